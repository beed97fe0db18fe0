"""Prices of the same answers here and by LiteLLM, with the differences.

    export DJANGO_SETTINGS_MODULE=tests.settings
    .ci/services run litellm -- .venv/bin/python -m tests.bench.litellm_prices

A scripted upstream answers each call twice. The first answer is read and priced here, by the public list prices. The second
goes through a LiteLLM of the script's own, which has its built-in prices, and states its cost in the record of its callback."""

import json
import os
import subprocess
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import django

django.setup()

from sandboxes.egress.model_pricing import RateBook  # noqa: E402 - needs the settings
from sandboxes.egress.prices import files  # noqa: E402
from sandboxes.egress.token_usage import UsageReader  # noqa: E402
from sandboxes.models import TokenRate  # noqa: E402
from tests.support.call_histories.answers import VENDORS, Script, Vendor  # noqa: E402
from tests.support.servers.ports import find_free_ports  # noqa: E402
from tests.support.waiting import wait_until  # noqa: E402

EGRESS = Path(__file__).resolve().parents[2] / "sandboxes" / "egress"
CALLBACK, PUBLIC_PRICES = EGRESS / "litellm_callback.py", EGRESS / "prices" / "public.toml"
START_SECONDS, RECORD_SECONDS = 180.0, 30.0
CACHE = {"input": 1000, "cache_read": 20_000, "output": 500}


class Case(NamedTuple):
    """Call of a model. `vendor` is a key of VENDORS."""

    title: str
    vendor: str
    model: str
    counts: dict[str, int]
    tier: str = ""


CASES = [
    Case("messages", "anthropic", "claude-sonnet-4-5", CACHE),
    Case("messages, cache written for 5 minutes", "anthropic", "claude-sonnet-4-5", CACHE | {"cache_write_5m": 8000}),
    Case("messages, cache written for an hour", "anthropic", "claude-sonnet-4-5", CACHE | {"cache_write_1h": 8000}),
    Case("messages, 3 searches", "anthropic", "claude-sonnet-4-5", CACHE | {"web_search": 3}),
    Case("messages, thinking", "anthropic", "claude-opus-4-5", CACHE | {"reasoning": 700}),
    Case("messages, 250,000 input tokens", "anthropic", "claude-sonnet-4-5", {"input": 250_000, "output": 1000}),
    Case("chat", "openai", "gpt-4o", CACHE),
    Case("chat, reasoning", "openai", "gpt-5", CACHE | {"reasoning": 900}),
    Case("chat, priority", "openai", "gpt-5", CACHE, "priority"),
    Case("chat, flex", "openai", "gpt-5", CACHE, "flex"),
    Case("chat, audio priced as text", "openai", "gpt-4o", CACHE | {"audio_input": 500}),
    Case("responses", "responses", "gpt-5", CACHE | {"reasoning": 900}),
    Case("embeddings", "embeddings", "text-embedding-3-small", {"input": 10_000}),
]


class Upstream(ThreadingHTTPServer):
    """Answers each request by the case whose title is in its prompt."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        body = json.loads(text)
        case = next(case for case in CASES if f"<{CASES.index(case)}>" in text)
        vendor = VENDORS[case.vendor]
        script = Script(case.model, case.counts, ("Hello", " there."), case.tier, first_counts={**case.counts, "output": 1})
        is_stream = bool(body.get("stream")) and vendor.build_events is not None
        content = json.dumps(vendor.build_document(script)).encode()
        if is_stream and vendor.build_events:
            content = b"".join(event.data for event in vendor.build_events(script))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if is_stream else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def post(url: str, body: dict[str, Any], **headers: str) -> tuple[str, bytes]:
    """Return content type and body of the answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.headers["Content-Type"]), answer.read()


def read_public_rates(model: str) -> list[TokenRate]:
    prices = files.parse_price_file(PUBLIC_PRICES.read_bytes(), only=[model]).prices
    return [
        TokenRate(
            pk=number, pattern=price.model, kind=price.kind, tokens_from=price.tokens_from, tier=price.tier,
            usd_per_million=price.usd_per_million, valid_from=datetime(2026, 1, 1, tzinfo=UTC),
        )
        for number, price in enumerate(prices)
        if price.model == model
    ]  # fmt: skip


def build_request(case: Case, *, streamed: bool) -> dict[str, Any]:
    vendor: Vendor = VENDORS[case.vendor]
    body = vendor.build_request(case.model, f"<{CASES.index(case)}>", 1000, streamed=streamed)
    return body | ({"service_tier": case.tier} if case.tier else {})


def price_here(upstream: Upstream, case: Case, *, streamed: bool) -> Decimal | None:
    """Read the answer as the egress proxy does, and price it by the public list prices."""
    content_type, content = post(upstream.url + VENDORS[case.vendor].path, build_request(case, streamed=streamed))
    reader = UsageReader(content_type)
    reader.feed(content)
    reader.end()
    price = RateBook(read_public_rates(case.model)).price(reader.usage.counts, reader.usage.tier)
    return price and price.usd


@contextmanager
def run_litellm(upstream: Upstream) -> Iterator[tuple[str, Path]]:
    """Run LiteLLM with its built-in prices. Yield its URL, and the file of its records."""
    python, [port] = Path(os.environ["TEST_LITELLM_PYTHON"]), find_free_ports()
    with tempfile.TemporaryDirectory(prefix="lh-prices-") as directory:
        home, url = Path(directory), f"http://127.0.0.1:{port}"
        (home / "litellm_callback.py").write_text(CALLBACK.read_text())
        models = []
        for model in sorted({case.model for case in CASES}):
            provider, path = ("anthropic", "") if model.startswith("claude") else ("openai", "/v1")
            parameters = {"model": f"{provider}/{model}", "api_base": upstream.url + path, "api_key": "none"}
            models.append({"model_name": model, "litellm_params": parameters})
        config = {"model_list": models, "litellm_settings": {"callbacks": ["litellm_callback.records"]},
                  "router_settings": {"num_retries": 0}, "general_settings": {"master_key": "sk-test"}}  # fmt: skip
        (home / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
        environment = {"PATH": os.environ["PATH"], "HOME": directory, "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                       "LEASEHOLD_RECORDS": str(home / "records.jsonl"), "DISABLE_ADMIN_UI": "True"}  # fmt: skip
        command = [str(python.parent / "litellm"), "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
        with (home / "log").open("wb") as log:
            process = subprocess.Popen([*command, "--telemetry", "False"], cwd=home, env=environment, stdout=log, stderr=log)
            try:
                wait_until(lambda: is_ready(url, process, home / "log"), "LiteLLM serves", within=START_SECONDS, every=0.5)
                yield url, home / "records.jsonl"
            finally:
                process.kill()
                process.wait()


def is_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-2000:]
    try:
        with urllib.request.urlopen(f"{url}/health/liveliness", timeout=5):
            return True
    except OSError:
        return False


def read_cost(records: Path, call_id: str) -> Decimal | None:
    """Wait for the record of a call. Return its cost, rounded as the product rounds it."""

    def find() -> list[Any]:
        lines = records.read_text().splitlines() if records.exists() else []
        return [found for line in lines if line.endswith("}") and (found := json.loads(line))["call"] == call_id]

    cost = wait_until(find, "the call is recorded", within=RECORD_SECONDS)[0]["cost"]
    return None if cost is None else round(Decimal(str(cost)), 9)


def main() -> None:
    upstream = Upstream()
    print(f"{'call':<42}{'way':<10}{'here':>12}{'LiteLLM':>12}{'difference':>13}")
    with run_litellm(upstream) as (url, records):
        for case in CASES:
            for streamed in (False, True) if VENDORS[case.vendor].build_events else (False,):
                call_id, here = uuid4().hex, price_here(upstream, case, streamed=streamed)
                headers = {"Authorization": "Bearer sk-test", "x-litellm-call-id": call_id}
                post(url + VENDORS[case.vendor].path, build_request(case, streamed=streamed), **headers)
                there = read_cost(records, call_id)
                difference = "none" if here is None or there is None else f"{here - there:.9f}".rstrip("0").rstrip(".")
                way = "stream" if streamed else "document"
                print(f"{case.title:<42}{way:<10}{here or 0:>12.7f}{there or 0:>12.7f}{difference:>13}", flush=True)


if __name__ == "__main__":
    main()
