"""Headers of previews: what a program in a sandbox may tell a visitor's browser, and what it learns from a visitor."""

import pytest
from aiohttp.test_utils import make_mocked_request

from controlplane.checks import check_preview_domain
from leases.stream_server.previews import SANDBOX_POLICY, _build_request_headers, build_response_headers

# Each acts on other documents of the origin, on other hosts of the site, or on a proxy before the stream server.
WIDE = [
    ("Report-To", '{"group": "a"}'), ("NEL", '{"report_to": "a"}'), ("Reporting-Endpoints", 'a="https://evil.example"'),
    ("Clear-Site-Data", '"*"'), ("Strict-Transport-Security", "max-age=1; includeSubDomains"), ("Service-Worker-Allowed", "/"),
    ("Alt-Svc", 'h2="evil.example:443"'), ("Access-Control-Allow-Origin", "*"), ("Access-Control-Allow-Credentials", "true"),
    ("Public-Key-Pins", "x"), ("Expect-CT", "x"), ("Origin-Agent-Cluster", "?1"), ("X-Accel-Redirect", "/private"),
    ("x-accel-limit-rate", "1"), ("X-Sendfile", "/etc/passwd"), ("Connection", "close"), ("Transfer-Encoding", "chunked"),
    ("Set-Cookie", "sessionid=x; Domain=example.com"), ("Set-Cookie", "a=1;domain = .example.com ;Secure"),
    ("Set-Cookie", "a=1; path=/; DOMAIN"),
]  # fmt: skip
OWN = [
    ("Set-Cookie", "sid=1; Path=/; Secure"),
    ("Set-Cookie", "b=domain=2"),
    ("X-Total-Count", "3"),
    ("WWW-Authenticate", "Basic"),
]
PLAIN = [("Content-Type", "text/html"), ("ETag", '"1"'), ("Location", "/x"), ("Content-Security-Policy", "default-src 'self'")]
ADDED = [("Referrer-Policy", "no-referrer"), ("X-Robots-Tag", "noindex")]


@pytest.mark.parametrize("has_own_host", [True, False])
@pytest.mark.parametrize("header", WIDE, ids=lambda header: f"{header[0]} {header[1][:20]}")
def test_header_that_acts_beyond_the_response_is_dropped(header: tuple[str, str], has_own_host: bool) -> None:
    passed = build_response_headers([header, *PLAIN], has_own_host=has_own_host)
    policy = [] if has_own_host else [("Content-Security-Policy", SANDBOX_POLICY)]
    assert [*passed.items()] == [*PLAIN, *ADDED, *policy]


def test_below_a_path_only_listed_headers_are_passed() -> None:
    unknown = [(f"{prefix}Header-Of-Next-Year", "1") for prefix in ("", "X-", "Content-", "Access-Control-")]
    passed = build_response_headers([*PLAIN, *OWN, *unknown], has_own_host=False)
    assert [*passed.items()] == [*PLAIN, *ADDED, ("Content-Security-Policy", SANDBOX_POLICY)]


def test_preview_with_a_host_of_its_own_has_cookies_and_headers_of_its_own() -> None:
    assert [*build_response_headers([*PLAIN, *OWN], has_own_host=True).items()] == [*PLAIN, *OWN, *ADDED]


KEY = "Bearer lh_0123abcd_" + "x" * 43


@pytest.mark.parametrize(
    ("prefix", "authorization", "passed"),
    [
        ("/previews/x", "Basic YTpi", None), ("/previews/x", KEY, None), ("", KEY, None),
        ("", KEY.replace("Bearer ", "bearer  "), None),
        ("", "Basic YTpi", "Basic YTpi"), ("", "Bearer of-the-program", "Bearer of-the-program"),
    ],
)  # fmt: skip
def test_program_gets_no_credential_of_the_visitor_for_another(prefix: str, authorization: str, passed: str | None) -> None:
    request = make_mocked_request(
        "GET", "/", headers={"Host": "x", "Authorization": authorization, "Cookie": "sessionid=1; a=2"}
    )
    headers = _build_request_headers(request, prefix=prefix)
    assert (headers.get("Authorization"), headers.get("Cookie")) == (passed, None if prefix else "a=2")


FORGED = {"Host": "evil.example", "X-Forwarded-Host": "evil.example", "X-Forwarded-Proto": "gopher", "X-Forwarded-Prefix": "/e"}


@pytest.mark.parametrize(
    ("public_url", "prefix", "seen"),
    [
        ("https://streams.example.org/x/previews/g/", "/previews/g", ("streams.example.org", "https", "/x/previews/g")),
        ("https://g.previews.example.net:8443/", "", ("g.previews.example.net:8443", "https", None)),
        ("", "/previews/g", ("evil.example", "http", "/previews/g")),
    ],
)
def test_program_learns_the_stated_address_and_not_that_of_the_request(
    public_url: str, prefix: str, seen: tuple[str, str, str | None]
) -> None:
    headers = _build_request_headers(make_mocked_request("GET", "/", headers=FORGED), prefix=prefix, public_url=public_url)
    assert tuple(headers.get(f"X-Forwarded-{name}") for name in ("Host", "Proto", "Prefix")) == seen


def test_cookies_of_the_console_are_known_by_their_present_names(settings) -> None:
    settings.SESSION_COOKIE_NAME, settings.CSRF_COOKIE_NAME = "__Host-sessionid", "__Host-csrftoken"
    cookies = {"Cookie": "__Host-sessionid=1; __Host-csrftoken=2; sessionid=3; messages=4"}
    headers = _build_request_headers(make_mocked_request("GET", "/", headers=cookies), prefix="")
    assert headers["Cookie"] == "sessionid=3; messages=4"


@pytest.mark.parametrize(
    ("domain", "found"),
    [
        ("", []), ("previews-of-example.net", []), ("p.example.net", []), ("preview.leasehold.example.com", ["leasehold.E014"]),
        ("leasehold.example.com", ["leasehold.E014"]), ("example.com", ["leasehold.E014"]),
        ("previews.example.com", ["leasehold.E014"]), ("x.streams.example.org", ["leasehold.E014"]),
        ("EXAMPLE.com", ["leasehold.E014"]), ("localhost", []), ("p.192.0.2.7", []), ("previews.co.uk", []),
        ("previews.leasehold.co.uk", ["leasehold.E014"]),
    ],
)  # fmt: skip
def test_preview_domain_below_another_name_of_the_installation_is_an_error(domain: str, found: list[str], settings) -> None:
    settings.PREVIEW_DOMAIN, settings.STREAM_URL = domain, "https://streams.example.org"
    settings.ALLOWED_HOSTS = ["leasehold.example.com", "127.0.0.1", "192.0.2.7", "www.leasehold.co.uk"]
    assert [problem.id for problem in check_preview_domain(None)] == found
