"""Image builds of the Docker provider, by the engine's own builder."""

import http.client
import io
import json
import tarfile
from collections.abc import Collection, Generator, Mapping
from contextlib import suppress
from datetime import timedelta
from urllib.parse import urlencode

from django.conf import settings
from docker.errors import APIError, ImageNotFound
from docker.types import LogConfig

from sandboxes.providers.base import BuiltImage
from sandboxes.providers.docker.commands import AGENT_UID, ContainerCommandProvider
from sandboxes.providers.docker.engine import build_unavailable, translate_errors
from sandboxes.providers.errors import BuildCommandFailed, FailureCause, ImageInUse, Missing, Rejected, Unavailable
from sandboxes.redaction.texts import quote_answer

BUILD_MEMORY_BYTES = 4 << 30  # of each build step
CHECK_MEMORY_BYTES = 256 << 20
CHECK_TIMEOUT_SECONDS = 60
# Programs and files of image/Dockerfile without which no sandbox starts, no command runs or no file is transferred. The script
# runs as the agent, with the interpreter that process 1 would use, and prints one line a problem.
CHECK_SCRIPT = """
import os, pwd, shutil
for name in ("agent.pyc", "files.py", "launch.py", "reap.py", "take_turn.py"):
    if not os.access(f"/opt/leasehold/{name}", os.R_OK):
        print(f"/opt/leasehold/{name} is missing or not readable by the agent")
if os.access("/opt/leasehold", os.W_OK):
    print("/opt/leasehold is writable by the agent")
if not os.access("/opt/leasehold/shim", os.X_OK):
    print("/opt/leasehold/shim is missing or not executable by the agent")
for name in ("bash", "python3"):
    if not shutil.which(name):
        print(f"{name} is not in PATH")
try:
    pwd.getpwuid(os.getuid())
except KeyError:
    print(f"no user with uid {os.getuid()}")
for directory in ("/workspace", "/data"):
    try:
        if os.stat(directory).st_uid != os.getuid():
            print(f"{directory} does not belong to the agent, uid {os.getuid()}")
    except OSError:
        print(f"{directory} is missing")
"""


class ContainerImagesProvider(ContainerCommandProvider):
    """Image verbs of DockerProvider."""

    builds_images = True
    build_user = "agent"

    def find_missing_images(self, images: Collection[str]) -> set[str]:
        missing = set()
        for image in images:
            try:
                with translate_errors():
                    self._engine.client.inspect_image(image)
            except Missing:
                missing.add(image)
        return missing

    def pull_image(self, image: str) -> Generator[str, None, None]:
        client = self._engine.client
        with translate_errors():
            with suppress(ImageNotFound):
                client.inspect_image(image)
                return
            for step in client.pull(image, stream=True, decode=True):
                if "error" in step:
                    raise Rejected(str(step["error"]).strip())
                if "progress" not in step:
                    yield f"{step.get('id', '')} {step.get('status', '')}\n".lstrip()

    def build_image(
        self,
        dockerfile: str,
        build: str,
        *,
        arguments: Mapping[str, str],
        labels: Mapping[str, str],
        silence: timedelta,
        use_cache: bool = True,
    ) -> Generator[str, None, BuiltImage]:
        options = {
            "t": build, "rm": 1, "forcerm": 1, "nocache": int(not use_cache), "memory": BUILD_MEMORY_BYTES,
            "memswap": BUILD_MEMORY_BYTES, "buildargs": json.dumps(dict(arguments)), "labels": json.dumps(dict(labels)),
        }  # fmt: skip
        connection = http.client.HTTPConnection("docker")
        # The builder ends a build whose client has closed the connection.
        connection.sock = self._engine.dial()
        try:
            connection.sock.settimeout(silence.total_seconds())
            path = f"/v{self._engine.client.api_version}/build?{urlencode(options)}"
            connection.request("POST", path, _pack_dockerfile(dockerfile), {"Content-Type": "application/x-tar"})
            response = connection.getresponse()
            if response.status != 200:
                raise _to_build_error(response.status, response.read())
            for line in response:
                step = json.loads(line)
                if detail := step.get("errorDetail"):
                    kind = BuildCommandFailed if detail.get("code") else Rejected
                    raise kind(str(detail.get("message") or step.get("error")).strip())
                yield str(step.get("stream") or step.get("status") or "")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise build_unavailable(error) from error
        finally:
            connection.close()
        with translate_errors():
            found = self._engine.client.inspect_image(build)
        return BuiltImage(found["Id"], int(found["Size"]))

    def check_image(self, image: BuiltImage) -> list[str]:
        with translate_errors():
            configuration = self._engine.client.inspect_image(image.id)["Config"]
        if configuration.get("Volumes"):
            return ["VOLUME: a volume would be writable beyond the limits of the sandbox"]
        if configuration.get("Healthcheck"):
            return ["HEALTHCHECK: the engine would start processes in the sandbox"]
        return self._run_check(image.id)

    def tag_image(self, build: str, tag: str) -> None:
        repository, _, version = tag.rpartition(":")
        with translate_errors():
            self._engine.client.tag(build, repository, version)
        self.remove_build(build)

    def remove_build(self, build: str) -> None:
        self.remove_image(build)

    def remove_image(self, image: str) -> None:
        with translate_errors(), suppress(ImageNotFound):
            try:
                self._engine.client.remove_image(image)
            except APIError as error:
                if error.status_code == 409:
                    raise ImageInUse(f"A container uses the image: {quote_answer(error.explanation)}") from error
                raise

    def _run_check(self, image: str) -> list[str]:
        client = self._engine.client
        with translate_errors():
            host_config = client.create_host_config(
                network_mode="none", cap_drop=["ALL"], security_opt=["no-new-privileges:true"], mem_limit=CHECK_MEMORY_BYTES,
                pids_limit=64, runtime=settings.DOCKER_RUNTIME or None, log_config=LogConfig(type="json-file"),
            )  # fmt: skip
            container = client.create_container(
                image, entrypoint=["python3", "-I", "-S", "-c", CHECK_SCRIPT], user=f"{AGENT_UID}:{AGENT_UID}", working_dir="/",
                labels={"leasehold.check": "1"}, host_config=host_config, use_config_proxy=False,
            )["Id"]  # fmt: skip
            try:
                client.start(container)
                status = client.wait(container, timeout=CHECK_TIMEOUT_SECONDS)["StatusCode"]
                output = client.logs(container).decode(errors="replace")
            except APIError as error:
                if error.status_code is None or error.status_code >= 500:
                    raise
                return [f"python3 does not start: {quote_answer(error.explanation)}"]
            finally:
                client.remove_container(container, force=True, v=True)
        return output.strip().splitlines()[:20] or ([f"python3 exits with {status}"] if status else [])


def _pack_dockerfile(dockerfile: str) -> bytes:
    """Return the build context: a tar with the Dockerfile alone, so that COPY and ADD find no file of the host."""
    content, archive = dockerfile.encode(), io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo("Dockerfile")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()


def _to_build_error(status: int, content: bytes) -> Rejected | Unavailable:
    """Return the error of a build that has not begun, such as 400 for a malformed Dockerfile."""
    try:
        message = str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        message = content.decode(errors="replace")
    return Rejected(message.strip()) if status < 500 else Unavailable(message.strip(), cause=FailureCause.ENGINE_ERROR)
