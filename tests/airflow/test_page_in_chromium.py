"""The page in a real browser, in a real Airflow: hostile names, the keyboard, and a DAG run by a button."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import uvicorn
from airflow.api_fastapi.app import create_app, get_auth_manager, purge_cached_app
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
from airflow.dag_processing.bundles.manager import DagBundlesManager
from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db
from psycopg2.extensions import parse_dsn

from airflow_provider_pgrepl.errors import resnapshot, retry
from airflow_provider_pgrepl.links.task import PAGE_PREFIX
from airflow_provider_pgrepl.replication.source.connection import Connection, rows
from demo.postgres import Server, free_port
from tests.airflow.conftest import eventually
from tests.conftest import closing_connection, fresh_database
from tests.support.chromium import PROGRAM, Browser, running_browser
from tests.support.page_state import HOSTILE, HOSTILE_ERROR, record_pipeline

DAGS = Path(__file__).parents[2] / "dags"
KEY = "0123456789abcdef" * 8

pytestmark = [
    # Of Airflow's own routes, in the thread of the server.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: sh setup/chromium.sh"),
    pytest.mark.thorough("airflow/test_page.py shows what the page is sent, and its content security policy"),
]


@pytest.fixture(scope="module")
def airflow(airflow_db: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of Airflow's API server, which knows the example DAG of tables for the pipeline `shop`."""
    port = free_port()
    file = tmp_path_factory.mktemp("shop") / "pipeline.json"
    file.write_text(json.dumps({"name": "shop", "lake": "/lake/shop", "tables": ["public.*"]}), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", KEY)
        patch.setenv("PGREPL_PIPELINE_FILE", str(file))
        patch.setenv("AIRFLOW__API__BASE_URL", f"http://127.0.0.1:{port}")
        purge_cached_app()
        DagBundlesManager().sync_bundles_to_db()
        for name in ("tables", "skip", "check_migration", "verify"):
            sync_bag_to_db(DagBag(str(DAGS / f"{name}.py"), bundle_path=DAGS), "dags-folder", None)
        config = uvicorn.Config(create_app(), host="127.0.0.1", port=port, log_level="error", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        eventually(lambda: server.started, "Airflow's API server")
        yield f"http://127.0.0.1:{port}"
        server.should_exit = True
        thread.join(60)
    purge_cached_app()


@pytest.fixture
def browser(airflow: str, dsn: str, pg: Connection, monkeypatch: pytest.MonkeyPatch) -> Iterator[Browser]:
    """A browser that is signed in, and the pipeline `shop` with hostile names in the state database."""
    record_pipeline(dsn, pg, "shop", 300)
    record_pipeline(dsn, pg, "billing", 1)
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", connection_of(dsn))
    monkeypatch.setenv("AIRFLOW__PGREPL__STATE_CONN_IDS", "shop")
    with running_browser() as found:
        token = get_auth_manager().generate_jwt(SimpleAuthManagerUser(username="ann", role="admin"))
        found.set_cookie(airflow, "_token", token)
        found.show(1280, 800)
        yield found


def connection_of(dsn: str) -> str:
    """Return the Airflow connection of a state database, in JSON."""
    parts = parse_dsn(dsn)
    fields = {"host": parts["host"], "port": int(parts["port"]), "login": parts["user"]}
    return json.dumps({"conn_type": "pgrepl", "schema": parts["dbname"], **fields})


def text_of(browser: Browser) -> str:
    return str(browser.evaluate("document.body.innerText"))


def open_customers(browser: Browser, airflow: str, pipeline: str = "shop") -> None:
    """Load the page, from the beginning, with a table of the pipeline."""
    browser.open("about:blank")
    browser.open(f"{airflow}{PAGE_PREFIX}/#/shop/{pipeline}/public/customers")
    browser.wait_for("document.querySelectorAll('.events li').length")


def press_button(browser: Browser, title: str) -> None:
    browser.evaluate(
        f"[...document.querySelectorAll('.tools button')].find(one => one.innerText === '{title}').click()"
    )


def ask_for_resume(browser: Browser) -> None:
    """Open the dialog, and wait until the run could be started."""
    press_button(browser, "Resume")
    browser.wait_for("document.querySelector('dialog[open] select')?.value === 'pgrepl_tables'")
    browser.wait_for("!document.querySelector('dialog [type=submit]').disabled")


def test_hostile_name_and_error_are_text_in_every_view(browser: Browser, airflow: str) -> None:
    table = "/".join(quote(part, safe="") for part in ("shop", "shop", HOSTILE.schema, HOSTILE.name))
    for view, element in (
        ("", ".card"),
        ("#/shop/shop", ".body .row"),
        (f"#/{table}", ".events li"),
    ):
        browser.open("about:blank")
        browser.open(f"{airflow}{PAGE_PREFIX}/{view}")
        browser.wait_for(f"document.querySelector('{element}') && document.documentElement.dataset.ready")
        assert HOSTILE_ERROR in text_of(browser)
        assert browser.evaluate("document.title") == "Replication"
        assert (
            browser.evaluate("document.querySelectorAll('img, body script, [onload], [onerror]').length") == 0
        )
    assert "<b>total</b>" in text_of(browser)
    assert browser.console == []


@pytest.mark.parametrize(
    ("button", "dag", "fields", "conf"),
    [
        ("Check a migration…", "pgrepl_check_migration", ["drop table orders"], {"sql": "drop table orders"}),
        (
            "Skip a transaction…",
            "pgrepl_skip",
            ["16/B374D848", " public.a\npublic.b\n"],
            {"lsn": "16/B374D848", "unchanged_tables": ["public.a", "public.b"]},
        ),
    ],
)
def test_migration_and_skip_are_runs_with_what_the_dialog_asks_for(
    browser: Browser, airflow: str, button: str, dag: str, fields: list[str], conf: dict[str, object]
) -> None:
    browser.open("about:blank")
    browser.open(f"{airflow}{PAGE_PREFIX}/#/shop/shop")
    browser.wait_for("document.querySelectorAll('.body .row').length === 303")
    press_button(browser, button)
    browser.wait_for(f"document.querySelector('dialog[open] select')?.value === '{dag}'")
    inputs = "document.querySelectorAll('dialog label:not(.tick) :is(input, textarea)')"
    for number, text in enumerate(fields):
        browser.evaluate(f"{inputs}[{number}].value = {json.dumps(text)}")
    browser.evaluate("document.querySelector('dialog .tick input')?.click()")
    browser.wait_for("!document.querySelector('dialog [type=submit]').disabled")
    browser.evaluate("document.querySelector('dialog [type=submit]').click()")
    browser.wait_for("document.querySelector('#runs .badge')?.innerText === 'queued'")
    runs = f"fetch('{airflow}/api/v2/dags/{dag}/dagRuns').then(answer => answer.json())"
    assert [run["conf"] for run in browser.evaluate(runs)["dag_runs"]] == [conf]


@pytest.mark.parametrize(
    ("button", "conf"),
    [
        # A copy of the DAG may repair by default.
        ("Verify", {"tables": ["public.customers"], "repair": False}),
        ("Repair", {"tables": ["public.customers"], "repair": True}),
    ],
)
def test_table_is_compared_and_repaired_by_runs_of_the_same_dag(
    browser: Browser, airflow: str, pg: Connection, button: str, conf: dict[str, object]
) -> None:
    verified = "update _pgrepl.tables set verified_through = '0/64', verified_at = now() - interval '3 h'"
    rows(pg, f"{verified} where table_name = 'customers' returning 1")
    open_customers(browser, airflow)
    assert "Found equal\n3 h ago at 0/64" in browser.evaluate("document.querySelector('.facts').innerText")
    # A DAG with a schedule is created paused, and no run of a paused DAG is started.
    unpause = (
        "{method: 'PATCH', headers: {'Content-Type': 'application/json'}, body: '{\"is_paused\": false}'}"
    )
    address = f"{airflow}/api/v2/dags/pgrepl_verify"
    assert browser.evaluate(f"fetch('{address}', {unpause}).then(answer => answer.status)") == 200
    press_button(browser, button)
    browser.wait_for("document.querySelector('dialog[open] select')?.value === 'pgrepl_verify'")
    browser.wait_for("!document.querySelector('dialog [type=submit]').disabled")
    is_dangerous = browser.evaluate("Boolean(document.querySelector('dialog .tick input'))")
    assert is_dangerous is (button == "Repair")
    browser.evaluate("document.querySelector('dialog .tick input')?.click()")
    browser.evaluate("document.querySelector('dialog [type=submit]').click()")
    browser.wait_for("document.querySelector('#runs .badge')?.innerText === 'queued'")
    runs = f"fetch('{airflow}/api/v2/dags/pgrepl_verify/dagRuns').then(answer => answer.json())"
    assert conf in [run["conf"] for run in browser.evaluate(runs)["dag_runs"]]


def test_publisher_of_a_table_is_shown_with_its_position(browser: Browser, airflow: str) -> None:
    table = "/".join(quote(part, safe="") for part in ("shop", "shop", "public", "customers"))
    browser.open("about:blank")
    browser.open(f"{airflow}{PAGE_PREFIX}/#/{table}")
    row = browser.wait_for("document.querySelector('.publishers tbody tr')?.innerText")
    assert row.split("\t")[:3] == ["events", "nats", "0/78"]


def test_table_is_found_by_keyboard_and_paused_by_a_dag_run(browser: Browser, airflow: str) -> None:
    browser.open(f"{airflow}{PAGE_PREFIX}/#/shop/shop")
    browser.wait_for("document.querySelectorAll('.body .row').length === 303")
    browser.press("/")
    browser.command("Input.insertText", text="orders_17")
    names = "[...document.querySelectorAll('.body .row .name')].map(one => one.textContent).join()"
    wanted = ",".join(f"sales.orders_{number}" for number in (17, *range(170, 180)))
    assert browser.wait_for(f"document.querySelectorAll('.body .row').length === 11 && {names}") == wanted
    browser.evaluate("document.querySelector('.body .row input').focus()")
    browser.press("ArrowDown")
    assert browser.evaluate("document.activeElement.ariaLabel") == "Select sales.orders_170"
    browser.evaluate("document.activeElement.click()")
    selected = "document.querySelector('.selection [role=status]').innerText"
    assert browser.evaluate(selected) == "1 table selected"
    press_button(browser, "Pause")
    # There are two pipelines, and a tag of the DAG names this one.
    browser.wait_for("document.querySelector('dialog[open] select')?.value === 'pgrepl_tables'")
    assert "sales.orders_170" in browser.evaluate("document.querySelector('dialog ul').innerText")
    browser.wait_for("!document.querySelector('dialog [type=submit]').disabled")
    browser.evaluate("document.querySelector('dialog [type=submit]').click()")
    browser.wait_for("document.querySelector('#runs .badge')?.innerText === 'queued'")
    open_customers(browser, airflow)
    browser.wait_for("document.querySelector('#runs .badge')?.innerText === 'queued'")
    assert "Pause sales.orders_170" in browser.evaluate("document.querySelector('#runs').innerText")
    runs = f"fetch('{airflow}/api/v2/dags/pgrepl_tables/dagRuns').then(answer => answer.json())"
    # Other tests of the worker may have triggered the DAG, too.
    conf = {"action": "pause", "tables": ["sales.orders_170"]}
    [run] = [run for run in browser.evaluate(runs)["dag_runs"] if run["conf"] == conf]
    # No scheduler runs here: the state is set as a person does it, and the page notices.
    address = f"{airflow}/api/v2/dags/pgrepl_tables/dagRuns/{quote(run['dag_run_id'])}"
    patch = (
        "{method: 'PATCH', headers: {'Content-Type': 'application/json'}, body: '{\"state\": \"success\"}'}"
    )
    assert browser.evaluate(f"fetch('{address}', {patch}).then(answer => answer.status)") == 200
    browser.wait_for("document.querySelector('#runs .badge')?.innerText === 'success'")
    assert browser.evaluate("Object.values(sessionStorage).join()") == "[]"


def test_actions_are_offered_for_tables_in_states_that_allow_them(
    browser: Browser, airflow: str, pg: Connection
) -> None:
    for name, state in (("orders_1", "paused"), ("orders_2", "streaming"), ("orders_3", "errored")):
        set_state = "update _pgrepl.tables set state = %s where table_name = %s returning 1"
        rows(pg, set_state, (state, name))
    browser.open(f"{airflow}{PAGE_PREFIX}/#/shop/shop")
    browser.wait_for("document.querySelectorAll('.body .row').length === 303")

    def select(number: int) -> set[str]:
        """Select or deselect a table, and return which of three buttons are enabled."""
        browser.evaluate(f"document.querySelector('[aria-label=\"Select sales.orders_{number}\"]').click()")
        enabled = "[...document.querySelectorAll('.selection button:enabled')].map(one => one.innerText)"
        return {"Pause", "Resume", "Retry"}.intersection(browser.evaluate(enabled))

    assert select(1) == {"Resume"}
    assert select(2) == {"Pause", "Resume"}
    assert select(3) == {"Pause", "Resume", "Retry"}
    assert select(1) == {"Pause", "Retry"}
    press_button(browser, "Retry")
    names = "document.querySelector('dialog ul').innerText"
    assert browser.wait_for(f"document.querySelector('dialog[open]') && {names}") == "sales.orders_3"


def test_commands_of_a_hint_are_buttons_for_its_table(browser: Browser, airflow: str, pg: Connection) -> None:
    hint = f"set it back at the source, then {retry('public.customers')}; or {resnapshot('public.customers')}"
    update = "update _pgrepl.tables set state = 'errored', error = 'DriftError', reason = 'r', hint = %s"
    rows(pg, f"{update} where table_name = 'customers' returning 1", (hint,))
    browser.open(f"{airflow}{PAGE_PREFIX}/#/shop/shop")
    browser.wait_for("document.querySelectorAll('.body .row').length === 303")
    row = "[...document.querySelectorAll('.body .row')].find(one => one.innerText.includes('customers'))"
    titles = f"[...{row}.querySelectorAll('button')].map(one => one.innerText)"
    assert browser.evaluate(titles) == ["Retry", "Resnapshot"]
    browser.evaluate(f"{row}.querySelector('button').click()")
    browser.wait_for("document.querySelector('dialog[open] select')?.value === 'pgrepl_tables'")
    assert browser.evaluate("document.querySelector('dialog h2').innerText").startswith(
        "Retry 1 table of shop"
    )
    assert browser.evaluate("document.querySelector('dialog ul').innerText") == "public.customers"
    open_customers(browser, airflow)
    in_notice = "[...document.querySelectorAll('.notice button')].map(one => one.innerText)"
    assert browser.evaluate(in_notice) == ["Retry", "Resnapshot"]


def test_removing_asks_for_confirmation(browser: Browser, airflow: str) -> None:
    open_customers(browser, airflow)
    press_button(browser, "Remove")
    browser.wait_for("document.querySelector('dialog[open] select')?.value === 'pgrepl_tables'")
    browser.wait_for("!document.querySelector('dialog [type=submit]').disabled")
    shown = "getComputedStyle(document.querySelector('dialog [type=submit]')).opacity"
    assert browser.evaluate(shown) == "0.5"
    browser.evaluate("document.querySelector('dialog [type=submit]').click()")
    assert browser.evaluate("document.querySelector('dialog form').checkValidity()") is False
    assert browser.evaluate("document.querySelector('dialog').open") is True
    browser.evaluate("document.querySelector('dialog .tick input').click()")
    assert browser.evaluate(shown) == "1"
    assert browser.evaluate("document.querySelector('dialog form').checkValidity()") is True


def test_answer_to_a_cancelled_dialog_leaves_the_next_one_open(browser: Browser, airflow: str) -> None:
    open_customers(browser, airflow)
    browser.evaluate(
        "window.answer = null; window.ask = window.fetch;"
        "window.fetch = async (url, given) => { const answer = await window.ask(url, given);"
        " if (given.method === 'POST') await new Promise((done) => { window.answer = done; });"
        " return answer; }"
    )
    ask_for_resume(browser)
    browser.evaluate("document.querySelector('dialog [type=submit]').click()")
    browser.wait_for("Boolean(window.answer)")
    browser.evaluate("document.querySelector('dialog [type=button]').click()")
    ask_for_resume(browser)
    browser.evaluate("window.answer()")
    browser.wait_for("document.querySelector('#runs .badge')?.innerText === 'queued'")
    assert browser.evaluate("document.querySelector('dialog').open") is True


def test_dags_are_offered_when_the_pipelines_cannot_be_read(browser: Browser, airflow: str) -> None:
    open_customers(browser, airflow)
    browser.evaluate(
        "window.ask = window.fetch; window.fetch = async (url, given) => {"
        " if (String(url).includes('api/databases')) throw new TypeError('refused');"
        " return window.ask(url, given); }"
    )
    press_button(browser, "Resume")
    browser.wait_for("document.querySelectorAll('dialog option').length === 2")
    assert browser.evaluate("document.querySelector('dialog option').innerText").startswith("Choose")
    assert browser.evaluate("document.querySelector('dialog [role=alert]').innerText") == ""


def test_pipeline_without_samples_has_no_numbers(browser: Browser, airflow: str, pg: Connection) -> None:
    rows(pg, "delete from _pgrepl.samples where pipeline = 'billing' returning 1")
    browser.open("about:blank")
    browser.open(f"{airflow}{PAGE_PREFIX}/")
    browser.wait_for("document.querySelectorAll('.card').length === 2")
    card = "[...document.querySelectorAll('.card')].find(one => one.innerText.includes('billing'))"
    lag, throughput = (
        browser.evaluate(f"{card}.children[{number}].innerText").split("\n") for number in (1, 2)
    )
    assert (lag, throughput) == (["Lag", "no samples in 24 h"], ["Throughput", "–"])


def test_ages_grow_while_nothing_else_changes(browser: Browser, airflow: str) -> None:
    open_customers(browser, airflow)
    browser.evaluate("document.querySelector('.facts time').textContent = 'old'")
    browser.wait_for("document.querySelector('.facts time')?.textContent.endsWith(' ago')")


def test_dag_of_another_pipeline_is_not_offered(browser: Browser, airflow: str) -> None:
    open_customers(browser, airflow, "billing")
    press_button(browser, "Resume")
    browser.wait_for("document.querySelector('dialog [role=alert]')?.innerText.startsWith('No DAG')")
    assert browser.evaluate("document.querySelectorAll('dialog option').length") == 1
    assert browser.evaluate("document.querySelector('dialog [type=submit]').disabled") is True


def test_copy_of_state_is_another_pipeline_for_which_no_dag_is_chosen(
    browser: Browser, airflow: str, server: Server, pg: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clone of a server has the record's ID, and the name of the pipeline that the DAG changes."""
    with fresh_database(server) as dsn:
        with closing_connection(dsn) as clone:
            record_pipeline(dsn, clone, "shop", 1)
            [(own,)] = rows(pg, "select id::text from _pgrepl.pipelines where name = 'shop'")
            rows(clone, "update _pgrepl.pipelines set id = %s returning 1", (own,))
        monkeypatch.setenv("AIRFLOW_CONN_CLONE", connection_of(dsn))
        monkeypatch.setenv("AIRFLOW__PGREPL__STATE_CONN_IDS", "clone,shop")
        browser.open(f"{airflow}{PAGE_PREFIX}/")
        browser.wait_for("document.querySelectorAll('.card').length === 3")
        browser.open(f"{airflow}{PAGE_PREFIX}/#/clone/shop/public/customers")
        browser.wait_for("document.querySelectorAll('.events li').length")
        press_button(browser, "Resume")
        browser.wait_for("document.querySelectorAll('dialog option').length === 2")
        assert browser.evaluate("document.querySelector('dialog select').value") == ""
        assert "shop (connection clone)" in browser.evaluate("document.querySelector('dialog h2').innerText")
