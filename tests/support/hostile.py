"""Programs in a sandbox that resist its end."""

# Stops all processes of the guest but process 1, and lets them go on for 4 ms every `pulse` seconds, if that is not 0.
STOPPER = """
import os, signal, sys, time
pulse, last = float(sys.argv[1]), time.monotonic()
time.sleep(1)
print("stopping", flush=True)
while True:
    goes_on = pulse and time.monotonic() > last + pulse
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and int(name) not in (1, os.getpid()):
                if b"agent.pyc" in open(f"/proc/{name}/cmdline", "rb").read():
                    os.kill(int(name), signal.SIGCONT if goes_on else signal.SIGSTOP)
        except OSError:
            pass
    if goes_on:
        last = time.monotonic()
    time.sleep(0.004 if goes_on else 0.0005)
"""
