"""Who may look at a dashboard, and what a browser may do with its pages."""

from __future__ import annotations

import hmac

import pytest

from fedveil.console.web import auth
from tests.fedveil.console.web.conftest import PORT, opened

HEADERS = {
    "content-security-policy": auth.POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "x-frame-options": "DENY",
}


@pytest.fixture
def client(runs):
    return opened(runs)


def test_the_link_gives_a_cookie_for_the_dashboard_s_own_place_alone(client):
    base, entry = client.base, client.entry
    client.cookies.clear()
    answer = client.get(f"{base}/?token={entry.token}")
    assert (answer.status_code, answer.headers["location"]) == (303, f"{base}/")
    cookie = answer.headers["set-cookie"]
    assert cookie == f"fedveil-{PORT}={entry.session}; HttpOnly; Path={base}/; SameSite=strict"
    assert entry.token not in cookie
    assert entry.token != entry.session
    assert len(entry.token) == len(entry.session) == 43  # 32 bytes
    assert not {entry.token, entry.session} & set(repr(entry).split("'"))
    assert client.get(f"{base}/").status_code == 200


@pytest.mark.parametrize(
    "path", ["/", "{base}/", "{base}/runs/fedrand", "{base}/static/page.css", "{base}/events", "/x"]
)
def test_a_neighbour_without_the_link_gets_nothing(client, path):
    client.cookies.clear()
    path = path.format(base=client.base)
    for query in ("", "?token=", "?token=" + "A" * 43, f"?token={client.entry.token}&token=x"):
        answer = client.get(path + query)
        assert answer.status_code == 401
        assert answer.text == "expected the link that fedveil printed when it started; open that link\n"
        assert "set-cookie" not in answer.headers


def test_the_token_is_taken_at_the_first_page_alone_and_a_wrong_cookie_nowhere(client):
    client.cookies.clear()
    assert client.get(f"{client.base}/sites?token={client.entry.token}").status_code == 401
    name = client.entry.cookie
    for wrong in ("", "x", client.entry.session[:-1], client.entry.session + "x", client.entry.token, "\xe9"):
        headers = {"cookie": f"{name}={wrong}".encode("latin-1")}
        assert client.get(f"{client.base}/", headers=headers).status_code == 401
    assert client.get(f"{client.base}/", headers={"cookie": f"{name}={client.entry.session}"}).status_code == 200
    assert client.get(f"{client.base}/", headers={"cookie": f"other={client.entry.session}"}).status_code == 401


def test_secrets_are_compared_in_constant_time(client, monkeypatch):
    seen, compare = [], hmac.compare_digest
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: seen.append(b) or compare(a, b))
    client.cookies.clear()
    client.get(f"{client.base}/?token=x")
    assert seen == [client.entry.token.encode(), client.entry.session.encode()]


def test_the_token_stays_in_no_address_also_where_the_cookie_is_there_already(client):
    answer = client.get(f"{client.base}/?token={client.entry.token}")
    assert (answer.status_code, answer.headers["location"]) == (303, f"{client.base}/")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", f"evil.example:{PORT}", "127.0.0.1.evil.example", "localhost.evil.example", "0.0.0.0:8050",
        "127.0.0.1:80x", "127.0.0.1:8050@evil.example", "", "[::1]:8050",
    ],
)  # fmt: skip
def test_a_name_that_somebody_has_bound_to_the_loopback_is_refused(client, host):
    answer = client.get(f"{client.base}/", headers={"host": host})
    assert answer.status_code == 421
    assert "fedrand" not in answer.text


@pytest.mark.parametrize("host", ["localhost:9000", "LOCALHOST", "127.0.0.1"])
def test_a_tunnel_may_end_at_another_port(client, host):
    headers = {"host": host, "cookie": f"{client.entry.cookie}={client.entry.session}"}
    assert client.get(f"{client.base}/", headers=headers).status_code == 200


def test_two_hosts_are_none(client):
    headers = [("host", "127.0.0.1"), ("host", "evil.example")]
    assert client.get(f"{client.base}/", headers=headers).status_code == 421


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW"])
def test_nothing_can_be_changed(client, method):
    answer = client.request(method, f"{client.base}/")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD"


def test_head_is_get_without_the_page(client):
    got, head = client.get(f"{client.base}/"), client.head(f"{client.base}/")
    assert head.status_code == 200
    assert head.content == b""
    assert head.headers["content-length"] == str(len(got.content))


def test_every_answer_forbids_what_no_page_of_ours_does(client):
    base, paths = client.base, ("/", "/runs/fedrand", "/static/page.css", "/static/live.js", "/none", "/static/none")
    answers = [client.get(base + path) for path in paths]
    answers += [client.get(f"{base}/", headers={"host": "evil.example"}), client.post(f"{base}/"), client.get("/other")]
    client.cookies.clear()
    answers.append(client.get(f"{base}/"))
    assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 404, 404, 421, 405, 401, 401]
    for answer in answers:
        assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS
    for word in ("unsafe", "http:", "*", "blob:"):
        assert word not in auth.POLICY
    assert auth.POLICY.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
