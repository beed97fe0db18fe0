/* Parent of one command in a sandbox: shim CWD PROGRAM [ARGUMENT...]

   The shim is a subreaper: every process that the command leaves behind becomes its child, whatever session or environment the
   process has, so the agent can find and kill it. The shim writes lines to descriptor 3: "S PID" when the command has started, and
   "CODE MESSAGE" when the command has ended or cannot be started. It ends when no descendant is left. A terminal on stdin becomes
   the command's controlling terminal. Compiled and static, because it exists once for each running command. */

#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { REPORT_FD = 3, NOT_STARTED = -1, NOT_EXECUTABLE = 126, NOT_FOUND = 127 };

static void report(int code, const char *call, const char *path, int error) {
    char text[512];
    int length = error ? snprintf(text, sizeof text, "%d %s %.300s: %s", code, call, path, strerror(error))
                       : snprintf(text, sizeof text, "%d", code);
    for (int i = 0; i < length; i++)
        if (text[i] == '\n') text[i] = ' ';
    text[length++] = '\n';
    if (write(REPORT_FD, text, (size_t)length) < 0) _exit(1);
}

static void report_start(pid_t command) {
    char text[32];
    int length = snprintf(text, sizeof text, "S %d\n", (int)command);
    if (write(REPORT_FD, text, (size_t)length) < 0) _exit(1);
}

int main(int count, char **words) {
    static const int ignored[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGPIPE, SIGXFSZ};
    volatile int error = 0; /* written by the child of vfork */
    int status;
    pid_t command, pid;
    sigset_t none;

    if (count < 3) return 2;
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++) signal(ignored[i], SIG_IGN);
    if (chdir(words[1])) {
        report(NOT_EXECUTABLE, "chdir", words[1], errno);
        return 0;
    }
    sigemptyset(&none);
    command = vfork();
    if (command == 0) {
        for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++) signal(ignored[i], SIG_DFL);
        sigprocmask(SIG_SETMASK, &none, NULL);
        setsid();
        ioctl(0, TIOCSCTTY, 0); /* an error if stdin is no terminal */
        close(REPORT_FD);
        execvp(words[2], words + 2);
        error = errno;
        _exit(NOT_FOUND);
    }
    if (command < 0) { /* the process limit is reached: the caller may start the command in another way */
        report(NOT_STARTED, "", "", 0);
        return 0;
    }
    for (int fd = 0; fd < REPORT_FD; fd++) close(fd);
    if (error) report(error == ENOENT ? NOT_FOUND : NOT_EXECUTABLE, "exec", words[2], error);
    else report_start(command);
    while ((pid = wait(&status)) > 0 || errno == EINTR)
        if (pid == command && !error) report(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), "", "", 0);
    return 0;
}
