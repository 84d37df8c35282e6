"""The page of `penstock dash` in a real browser, beside a real training and recorded runs."""

from __future__ import annotations

import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from penstock.monitor.runs.format import Note, RunOutcome
from penstock.monitor.runs.reader import ask, open_run
from penstock.units import parse_bytes
from support.browser import HOW_TO_INSTALL, Witness, browser_path, faint_texts, started, widest
from support.recorded_runs import begin_run, fill, point_at

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request, Route

pytest.importorskip("playwright", reason='no Playwright here; run: pip install "penstock[dev]"')
pytestmark = [
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(browser_path() is None, reason=HOW_TO_INSTALL),
]

TOKEN, ANOTHER_TOKEN = "a-token-of-the-tests", "another-token-of-the-tests"
PATIENCE_MS = 30_000
DAY_S = 86_400
HOSTILE = (
    "<img src=x onerror=alert(1)><script>alert(2)</script>",
    "\u202e🎉🎉 </title>\"'`${alert(3)}",
    "n" * 10_000,
)
TRAINING = """
import time, torch, penstock
class Frames(torch.utils.data.Dataset):
    def __len__(self): return 1_000_000
    def __getitem__(self, index):
        time.sleep(0.02); return torch.zeros(1 << 16)
loader = penstock.DataLoader(Frames(), 4, num_workers=2, memory="256MB", name="train")
with penstock.Monitor(loader, every=None, run="frames") as monitor:
    for number, batch in enumerate(loader):
        monitor.step()
        if number == 0: monitor.log("first batch"); print(monitor.run_id, flush=True)
        time.sleep(0.02)
"""


class Dash:
    """`penstock dash`, which can be killed and started again on the same port."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.port = 0
        self.start(TOKEN)

    def start(self, token: str) -> None:
        self.token = token
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "dash", "--json", "--port", str(self.port)],
            stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PENSTOCK_HOME": str(self._home), "PENSTOCK_DASH_TOKEN": token},
        )  # fmt: skip
        assert self._process.stdout is not None
        self.port = json.loads(self._process.stdout.readline())["port"]

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.address + path, timeout=30) as answer:
            return json.load(answer)


@dataclass(frozen=True, kw_only=True)
class Training:
    home: Path
    run_id: str
    pid: int

    def state(self) -> dict[str, Any]:
        """What the process itself says."""
        with open_run(self.home, self.run_id) as run:
            return ask(run, {"do": "state"})["state"]["loaders"][0]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    day: str
    hostile: list[str]
    others: list[str]


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ps-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def process(home: Path) -> Iterator[subprocess.Popen[str]]:
    """The training, started before anything else: torch takes seconds to load."""
    begun = subprocess.Popen(
        [sys.executable, "-c", TRAINING], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=os.environ | {"PENSTOCK_HOME": str(home)},
    )  # fmt: skip
    yield begun
    begun.kill()
    begun.communicate()


@pytest.fixture(scope="module")
def recorded(process: subprocess.Popen[str], home: Path) -> Recorded:
    """19 runs that are over, beside the one that goes on."""
    now_s = time.time()
    ids: list[str] = []
    for number, name in enumerate((*HOSTILE, *(f"sweep {number}" for number in range(15)))):
        ended_s = now_s - 600 * (number + 1)
        record = begin_run(home, name, started_s=ended_s - 60)
        fill(record, 60, ended_s=ended_s)
        why = Note(t_s=ended_s - 9, who="governor", kind="decision", what="workers 4 -> 6: <b>memory</b> allows 7")
        record.write(notes=[why])
        # The last one goes on for half an hour without a point.
        over_s = ended_s + 1800 if name == "sweep 14" else ended_s
        record.finish(RunOutcome(state="failed" if number % 5 == 1 else "finished", t_s=over_s, what="<i>E</i>: no"))
        ids.append(record.id)
    day = begin_run(home, "a day", started_s=now_s - DAY_S - 30_000)
    ended_s = now_s - 30_000
    # As thinning leaves a day: every minute, every 10 s, every second.
    ages = [*range(DAY_S, 10_800, -60), *range(10_800, 600, -10), *range(600, -1, -1)]
    day.write([point_at(ended_s - age_s, number, span_s=60) for number, age_s in enumerate(ages)])
    fill(day, 2, ended_s=ended_s + 2)
    day.finish(RunOutcome(state="finished", t_s=ended_s))
    return Recorded(day=day.id, hostile=ids[:3], others=ids[3:])


@pytest.fixture(scope="module")
def dash(recorded: Recorded, home: Path) -> Iterator[Dash]:
    served = Dash(home)
    yield served
    served.kill()


@pytest.fixture(scope="module")
def chromium(dash: Dash) -> Iterator[Browser]:
    with started() as browser:
        yield browser


@pytest.fixture(scope="module")
def training(process: subprocess.Popen[str], home: Path) -> Training:
    assert process.stdout is not None
    run_id = process.stdout.readline().strip()
    assert run_id, "the training ended"
    return Training(home=home, run_id=run_id, pid=process.pid)


@pytest.fixture
def witness() -> Witness:
    return Witness()


@pytest.fixture
def page(chromium: Browser, witness: Witness) -> Iterator[Page]:
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    opened = context.new_page()
    witness.watch(opened)
    yield opened
    context.close()
    assert witness.complaints == []


def open_page(page: Page, dash: Dash, fragment: str = "", *, token: str | None = None) -> None:
    page.goto(f"{dash.address}#token={token or dash.token}{fragment}")


def data(page: Page, name: str) -> str:
    """What the page says of itself."""
    return page.evaluate("(name) => document.documentElement.dataset[name] ?? ''", name)


def wait_until(page: Page, condition: Callable[[], Any], within_s: float = PATIENCE_MS / 1000) -> Any:
    """Looks again and again; the page goes on meanwhile."""
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, page.locator("body").inner_text()[:3000]
        page.wait_for_timeout(50)
    return found


def wait_live(page: Page) -> None:
    wait_until(page, lambda: data(page, "connection") == "live")


def wait_drawn(page: Page) -> float:
    """Milliseconds it took to draw the run that was opened."""
    return float(wait_until(page, lambda: data(page, "drawnMs")))


def shows_all(page: Page, dash: Dash, training: Training) -> bool:
    """Whether the page has every point up to its last one."""
    recorded_s = dash.get(f"api/runs/{training.run_id}/points?most=5000")["t_s"]
    last_s = float(data(page, "lastPoint"))
    shown = int(page.locator(".plot").first.get_attribute("aria-valuemax") or 0) + 1
    return shown == sum(1 for t_s in recorded_s if t_s <= last_s + 0.001)


def wait_recorded(page: Page, training: Training, since_s: float) -> None:
    """Until there are points that a page which stopped then does not have."""
    with open_run(training.home, training.run_id) as run:
        wait_until(page, lambda: len(run.points(since=since_s)) > 1)


def test_twenty_runs_are_listed_filtered_and_sorted(
    page: Page, dash: Dash, recorded: Recorded, training: Training
) -> None:
    open_page(page, dash)
    rows = page.locator("table.runs tbody tr")
    wait_until(page, lambda: rows.count() == 20)
    assert "token" not in page.url, "the token is not left in the address bar"
    assert re.match(r"frames\s+running", rows.first.locator(".name").inner_text()) is None, "the state has its column"
    assert rows.first.locator(".state").first.inner_text() == "running"
    cells = page.get_by_role("row").filter(has_text="sweep 7").locator("td.number").all_inner_texts()
    assert cells[:3] == ["640", "10%", "7.00 GiB"]
    page.get_by_label("filter").fill("sweep failed")
    wait_until(page, lambda: rows.count() == 3)
    assert all("failed" in text for text in rows.all_inner_texts())
    page.get_by_label("filter").fill("")
    page.get_by_role("button", name="run", exact=True).click()
    assert page.locator("th.name").get_attribute("aria-sort") == "ascending"
    assert rows.nth(1).locator(".name a").inner_text() == "a day"


def test_names_of_any_kind_are_text(page: Page, dash: Dash, recorded: Recorded) -> None:
    open_page(page, dash)
    names = page.locator("table.runs .name a")
    wait_until(page, lambda: names.count() == 20)
    shown = names.all_inner_texts()
    assert HOSTILE[0] in shown and any("🎉🎉 </title>\"'`${alert(3)}" in each for each in shown)
    long = next(each for each in shown if each.startswith("nnn"))
    assert len(long) == 80 and long.endswith("…") and widest(page) == 1280
    link = names.filter(has_text="nnnn")
    assert link.get_attribute("title") == HOSTILE[2]
    for run_id, name in zip(recorded.hostile, HOSTILE, strict=True):
        page.goto(f"{dash.address}#run={run_id}")
        wait_until(page, lambda name=name: name[5:40] in page.locator("h1").inner_text())
        assert widest(page) == 1280
        if len(name) > 120:
            page.get_by_text("the whole name").click()
            assert page.locator(".whole").inner_text() == name
    assert "workers 4 -> 6: <b>memory</b> allows 7" in page.locator("[data-look=decision]").inner_text()
    page.goto(f"{dash.address}#compare={','.join(recorded.hostile)}")
    wait_until(page, lambda: data(page, "comparedPoints"))
    assert HOSTILE[0][:20] in page.locator("table.compared").inner_text() and widest(page) == 1280
    assert page.locator("img, main script, main b:has-text('memory')").count() == 0


def test_a_day_of_points_is_drawn_with_less_than_a_second_of_work(page: Page, dash: Dash, recorded: Recorded) -> None:
    tools = page.context.new_cdp_session(page)
    # Processor time of the page's thread, which other programs on this machine do not change.
    tools.send("Performance.enable", {"timeDomain": "threadTicks"})
    open_page(page, dash, f"&run={recorded.day}")
    wait_drawn(page)
    used = {each["name"]: each["value"] for each in tools.send("Performance.getMetrics")["metrics"]}
    assert used["TaskDuration"] < 1.0 and int(data(page, "drawnPoints")) > 1000
    titles = page.locator(".chart h3").all_inner_texts()
    assert titles == ["Memory", "Samples per second", "Waiting for data", "GPU memory", "GPU busy", "Cache hit rate",
                      "Cache memory"]  # fmt: skip
    assert page.locator(".plot").first.get_attribute("aria-label") == "Memory"
    assert re.search(r"latest: trainer 2\.50 GiB, .*limit 16\.0 GiB, budget 4\.00 GiB",
                     page.locator(".plot").first.get_attribute("aria-valuetext") or "")  # fmt: skip
    inked = """(canvas) => { const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const seen = new Set(); for (let i = 0; i < data.length; i += 4) seen.add(data.slice(i, i + 3).join());
        return [...seen]; }"""
    colours = page.locator(".plot canvas").first.evaluate(inked)
    assert {"0,114,178", "230,159,0", "0,158,115", "204,121,167", "163,171,178"} <= set(colours), "all five layers"
    page.get_by_text("10 min", exact=True).click()
    wait_until(page, lambda: 590 <= int(data(page, "drawnPoints")) <= 610)


def test_a_time_without_points_is_drawn_empty(page: Page, dash: Dash, recorded: Recorded) -> None:
    open_page(page, dash, f"&run={recorded.others[-1]}")
    plot = page.locator(".plot").first
    wait_until(page, lambda: plot.count() and plot.get_attribute("aria-valuemax") == "59")
    page.get_by_text("10 min", exact=True).click()
    wait_until(page, lambda: plot.get_attribute("aria-valuetext") == "latest: nothing yet")
    assert page.get_by_text("No points are recorded of this time.").is_visible()
    assert page.locator(".chart").nth(1).locator(".legend").inner_text().split() == ["samples/s", "-"]
    page.get_by_text("3 h", exact=True).click()
    wait_until(page, lambda: plot.get_attribute("aria-valuemax") == "59")


def test_an_event_that_cannot_be_shown_does_not_break_the_line(page: Page, dash: Dash, witness: Witness) -> None:
    witness.tolerated = ("cannot be shown", "status of 404")
    odd = {"id": "odd", "name": 7, "state": "finished", "started_s": "abc", "loaders": "none", "tried": {"a": 1}}
    plain = {"id": "plain", "name": "plain", "state": "finished", "started_s": 1.0, "loaders": [None, {}], "tried": [3]}
    told = ("null", "{broken", json.dumps({"now_s": 1.0, "home": "/h", "runs": [odd, None, plain]}))
    body = "".join(f"event: runs\ndata: {each}\n\n" for each in told)
    answer = {"status": 200, "content_type": "text/event-stream", "body": body}
    page.route(re.compile("/api/events"), lambda route: route.fulfill(**answer))
    open_page(page, dash)
    wait_until(page, lambda: page.locator("table.runs tbody tr").count() == 2)
    assert sum("cannot be shown" in each for each in witness.errors) >= 2
    page.goto(f"{dash.address}#compare=odd,plain")
    wait_until(page, lambda: page.locator("table.compared tbody tr").count() == 2)


def check_journal(page: Page) -> None:
    """It is bounded, and its entries bear their date from the next day on."""
    times = page.locator(".entries .time")
    wait_until(page, times.count)
    page.clock.set_fixed_time(datetime.now() + timedelta(days=1))
    wait_until(page, lambda: re.fullmatch(r"[A-Z][a-z]{2} \d+ \d\d:\d\d", times.first.inner_text().strip()))
    kept = page.evaluate("""async () => {
        const { Journal } = await import("/static/journal.js");
        const journal = new Journal(() => {});
        const alert = { number: 1, t_s: 5, rule: "memory", state: "raised", what: "full" };
        journal.addAlerts([alert]);
        for (let number = 0; number < 6000; number += 1500) {
            const some = Array.from({ length: 1500 }, (_, i) => ({ number: number + i, t_s: number + i, what: "" }));
            journal.addNotes(some);
        }
        return [journal.marks.length, journal.marks[1].t_s, journal.marks.at(-1).t_s, journal.standing];
    }""")
    assert kept == [5001, 1000, 5999, ["full"]]


def test_a_hidden_tab_holds_no_connection_and_catches_up_with_a_bounded_journal(
    page: Page, dash: Dash, training: Training
) -> None:
    turn = """(isHidden) => {
        Object.defineProperty(document, "hidden", { configurable: true, get: () => isHidden });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    open_page(page, dash, f"&run={training.run_id}")
    wait_drawn(page)
    wait_live(page)
    with page.expect_event("requestfailed", lambda request: "/api/events" in request.url):
        page.evaluate(turn, True)
    wait_until(page, lambda: data(page, "connection") == "paused")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(done))")  # what came before is drawn
    left_s = float(data(page, "lastPoint"))
    wait_recorded(page, training, left_s)
    assert data(page, "connection") == "paused" and float(data(page, "lastPoint")) == left_s
    page.evaluate(turn, False)
    wait_live(page)
    wait_until(page, lambda: float(data(page, "lastPoint")) > left_s)
    wait_until(page, lambda: shows_all(page, dash, training))
    check_journal(page)


def test_figures_update_by_themselves_and_agree_with_proc(page: Page, dash: Dash, training: Training) -> None:
    open_page(page, dash, f"&run={training.run_id}")
    wait_drawn(page)
    first = float(data(page, "lastPoint"))
    step = page.locator("[data-tile=time] .remark")
    before = wait_until(page, step.inner_text)
    wait_until(page, lambda: float(data(page, "lastPoint")) > first and step.inner_text() != before)
    assert page.locator(".state").first.inner_text() == "running"
    assert page.locator(".chart h3").all_inner_texts() == ["Memory", "Samples per second", "Waiting for data"]

    def agrees_with_proc() -> bool:
        root = psutil.Process(training.pid)
        truth = sum(each.memory_full_info().pss for each in (root, *root.children(recursive=True)))
        shown = page.locator("[data-tile=memory] .value").inner_text()
        return parse_bytes(shown) == pytest.approx(truth, rel=0.05)

    wait_until(page, agrees_with_proc)


def test_a_valve_turned_in_the_page_has_changed_the_loader_when_the_page_says_so(
    page: Page, dash: Dash, training: Training, witness: Witness
) -> None:
    witness.tolerated = ("status of 400", "status of 503")
    open_page(page, dash, f"&run={training.run_id}")
    workers = page.get_by_label("workers", exact=True)
    wait_until(page, lambda: workers.count() and workers.input_value() == "2")
    answer = page.locator(".answer")
    page.get_by_label("more: workers").click()
    page.get_by_role("button", name="Apply").click()
    wait_until(page, lambda: answer.inner_text().startswith("Now: workers 3, depth "))
    assert training.state()["configuration"]["workers"] == 3
    wait_until(page, lambda: page.locator("table.workers tbody tr").count() == 3)
    wait_until(page, lambda: "page · resize" in page.locator(".entries").inner_text())
    page.get_by_label("memory", exact=True).fill("plenty")
    page.get_by_role("button", name="Apply").click()
    wait_until(page, lambda: re.match(r"Refused: memory='plenty' is not a size", answer.inner_text()))
    assert answer.get_attribute("aria-live") == "polite"
    assert training.state()["configuration"]["memory"] == "256MB"
    page.get_by_label("memory", exact=True).fill("256MB")
    held: list[Route] = []
    page.route(re.compile("/set$"), lambda route: held.append(route))
    depth = page.get_by_label("depth", exact=True)
    depth.fill("11")
    page.get_by_role("button", name="Apply").click()
    depth.fill("12")
    wait_until(page, lambda: held)
    held[0].continue_()
    wait_until(page, lambda: re.match(r"Now: workers \d+, depth 11,", answer.inner_text()))
    assert depth.get_attribute("data-changed") == "yes" and depth.input_value() == "12", "typed, but not in force"
    page.get_by_role("button", name="Apply").click()
    wait_until(page, lambda: len(held) == 2)
    held[1].fulfill(status=503, json={"why": "it is busy"})
    wait_until(page, lambda: answer.inner_text() == "No answer; it may have been applied: it is busy")


def test_a_worker_that_is_killed_shows_as_a_restart(page: Page, dash: Dash, training: Training) -> None:
    open_page(page, dash, f"&run={training.run_id}")
    wait_until(page, lambda: page.locator("table.workers tbody tr").count() >= 2)
    victim = next(each for each in training.state()["workers"] if each["pid"] and not each["leaving"])
    os.kill(victim["pid"], signal.SIGKILL)
    wait_until(page, lambda: "restarted 1" in page.locator("table.workers").inner_text())
    wait_until(page, lambda: "was killed by signal SIGKILL" in page.locator("[data-look=trouble]").first.inner_text())
    wait_until(page, lambda: "1 restarted" in page.locator("[data-tile=workers]").inner_text())


def test_a_lost_server_is_reported_and_missed_points_are_fetched(
    page: Page, dash: Dash, training: Training, witness: Witness
) -> None:
    witness.tolerated = ("ERR_", "status of 401")
    shown_to: list[str] = []

    def note_token(request: Request) -> None:
        if request.method == "GET" and "authorization" in request.headers:
            shown_to.append(request.url)

    page.on("request", note_token)
    open_page(page, dash, f"&run={training.run_id}")
    wait_drawn(page)
    wait_live(page)
    dash.kill()
    words = page.locator("#connection-words")
    wait_until(page, lambda: words.inner_text().startswith("disconnected: "))
    lost_s = float(data(page, "lastPoint"))
    assert page.locator(".chart").count() == 3, "what was drawn stays"
    wait_recorded(page, training, lost_s)
    dash.start(ANOTHER_TOKEN)
    wait_live(page)
    wait_until(page, lambda: float(data(page, "lastPoint")) > lost_s)
    wait_until(page, lambda: shows_all(page, dash, training))
    page.get_by_label("more: depth").click()
    page.get_by_role("button", name="Apply").click()
    answer = page.locator(".answer")
    wait_until(page, lambda: answer.inner_text().startswith("Refused: "))
    assert page.locator("#token").is_visible()
    open_page(page, dash, f"&run={training.run_id}")  # the address it has now: only the fragment is another
    wait_until(page, lambda: not page.locator("#token").is_visible())
    page.get_by_role("button", name="Apply").click()
    wait_until(page, lambda: answer.inner_text().startswith("Now: "))
    assert shown_to == [], "whoever holds the port now could have read the token"


def test_a_wrong_token_is_reported_and_another_one_requested(
    page: Page, dash: Dash, training: Training, witness: Witness
) -> None:
    witness.tolerated = ("status of 401",)

    def as_from_elsewhere(route: Route) -> None:
        """Reading needs the token, too, of a server that other machines can reach."""
        if "authorization" in route.request.headers:
            route.continue_()
        else:
            route.fulfill(status=401, json={"why": "a token is needed"})

    page.route(re.compile("/api/"), as_from_elsewhere)
    open_page(page, dash, token="wrong")
    why = page.locator("#token-why")
    wait_until(page, lambda: why.inner_text().startswith("The token is wrong."))
    assert data(page, "connection") == "refused" and page.locator("table.runs tbody tr").count() == 0
    page.wait_for_function("document.activeElement.id === 'token-field'")
    page.keyboard.type(dash.token)
    page.keyboard.press("Enter")
    wait_until(page, lambda: page.locator("table.runs tbody tr").count() == 20)
    assert not page.locator("#token").is_visible()
    page.goto(f"{dash.address}#run={training.run_id}")
    wait_drawn(page)
    wait_live(page)


@contextmanager
def another_site() -> Iterator[str]:
    """A page of somebody else's, on another port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>elsewhere</title>")

        def log_message(self, format: str, *args: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_another_page_can_neither_read_nor_change_anything(
    page: Page, dash: Dash, training: Training, witness: Witness
) -> None:
    witness.tolerated = ("CORS", "ERR_", "status of 4")
    before = training.state()["configuration"]
    attack = """async ([url, token, kind, mode]) => {
        const headers = {"Content-Type": kind, ...(mode === "cors" ? {Authorization: `Bearer ${token}`} : {})};
        try {
            const answer = await fetch(url, {method: "POST", mode, headers, body: '{"loader":null,"workers":7}'});
            return `${answer.type} ${answer.status}`;
        } catch { return "refused"; }
    }"""
    target = f"{dash.address}api/runs/{training.run_id}/set"
    with another_site() as elsewhere:
        page.goto(elsewhere)
        assert page.evaluate(attack, [target, dash.token, "application/json", "cors"]) == "refused"
        form = page.evaluate(attack, [target, dash.token, "text/plain", "no-cors"])
        assert form == "refused", "sent as a form would be"
        read = "(url) => fetch(url).then(() => 'read', () => 'refused')"
        assert page.evaluate(read, f"{dash.address}api/runs") == "refused"
        headers = {"Authorization": f"Bearer {dash.token}", "Origin": elsewhere[:-1]}
        headers["Content-Type"] = "application/json"
        request = urllib.request.Request(target, b'{"loader":null,"workers":7}', headers)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request, timeout=30)
    assert training.state()["configuration"] == before


def test_everything_can_be_done_with_the_keyboard(page: Page, dash: Dash, training: Training) -> None:
    open_page(page, dash)
    wait_until(page, lambda: page.locator("table.runs tbody tr").count() == 20)
    here = """() => { const at = document.activeElement, style = getComputedStyle(at);
        const before = window.lastFocus; window.lastFocus = at;
        return {tag: at.tagName, text: (at.getAttribute("aria-label") || at.textContent || at.placeholder).trim(),
            isNext: !before || Boolean(before.compareDocumentPosition(at) & Node.DOCUMENT_POSITION_FOLLOWING),
            ring: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2 ||
                (at.matches(".ranges input") && getComputedStyle(at.nextElementSibling).outlineStyle !== "none")}; }"""

    def tab_to(wanted: str) -> list[str]:
        """Tab until something of that name is reached."""
        passed: list[str] = []
        while not passed or not re.match(wanted, passed[-1]):
            page.keyboard.press("Tab")
            at = page.evaluate(here)
            assert at["isNext"], f"{at} comes before {passed[-1:]}"
            assert at["ring"], f"{at} has focus and does not show it"
            passed.append(at["text"])
            assert len(passed) < 80, passed
        return passed

    assert tab_to("frames")[:4] == ["Skip to content", "penstock", "Runs", "Compare"]
    page.keyboard.press("Enter")
    wait_drawn(page)
    assert page.evaluate("document.activeElement.tagName") == "H1", "a screen reader begins at the title"
    tab_to("Memory$")
    plot = page.locator(".plot").first
    said, last_s = plot.get_attribute("aria-valuetext") or "", float(data(page, "lastPoint"))
    wait_until(page, lambda: float(data(page, "lastPoint")) > last_s)
    assert said.startswith("latest: trainer ") and plot.get_attribute("aria-valuetext") == said, "it is being read out"
    page.keyboard.press("Home")
    said = plot.get_attribute("aria-valuetext") or ""
    assert re.match(r"\d\d:\d\d:\d\d: trainer [\d.]+ [MG]iB, ", said) and plot.get_attribute("aria-valuenow") == "0"
    page.keyboard.press("ArrowRight")
    assert plot.get_attribute("role") == "slider" and plot.get_attribute("aria-valuenow") == "1"
    page.keyboard.press("End")
    for _ in range(20):
        page.keyboard.press("PageUp")
        if "first batch" in (plot.get_attribute("aria-valuetext") or ""):
            break
    assert "first batch" in page.locator(".tip").first.inner_text(), "a mark's words"
    page.evaluate("window.lastFocus = document.querySelector('h1')")
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.textContent") == "as table"
    page.keyboard.press("Enter")
    assert page.get_by_role("region", name="Memory, as table").locator("tbody tr").count() > 3
    depth = page.get_by_label("depth", exact=True)
    tab_to("fewer: depth")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowUp")
    wanted = depth.input_value()
    page.keyboard.press("Enter")
    wait_until(page, lambda: page.locator(".answer").inner_text().startswith("Now: "))
    assert training.state()["configuration"]["depth"] == int(wanted)


def test_runs_are_compared_side_by_side(page: Page, dash: Dash, recorded: Recorded, training: Training) -> None:
    open_page(page, dash)
    for name in ("sweep 3", "sweep 4", "frames", "a day"):
        page.get_by_label(re.compile(f"^compare {name},")).check()
    page.get_by_role("link", name="Compare 4").click()
    table = page.locator("table.compared")
    wait_until(page, lambda: table.locator("tbody tr").count() >= 4)
    assert page.locator("tr", has_text="sweep 3").locator("[data-best]").count() >= 1
    assert "4 workers, prefetch 2, 4GB, batch 32" in table.inner_text() and "256MB, batch 4" in table.inner_text()
    wait_until(page, lambda: int(data(page, "comparedPoints") or 0) > 800)
    drawn = page.locator(".comparison .chart")
    wait_until(page, lambda: drawn.first.locator(".legend li").count() == 4)
    assert drawn.locator("h3").all_inner_texts() == ["Samples per second since the start", "Memory since the start"]
    drawn.first.locator(".plot").focus()
    page.keyboard.press("End")
    values = drawn.first.locator(".legend b").all_inner_texts()
    assert values[:3] == ["-", "-", "-"] and values[3].isdigit(), "three of them did not run for so long"
    drawn.first.get_by_role("button", name="as table").click()
    cells = drawn.first.locator("tbody tr").first.locator("td").all_inner_texts()
    assert cells[:3] == ["-", "-", "-"] and cells[3].isdigit()
    page.get_by_label(re.compile("^remove a day,")).first.click()
    wait_until(page, lambda: "a day" not in table.inner_text())
    assert recorded.day not in page.url and training.run_id in page.url


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_at_any_width_in_both_schemes(
    page: Page, dash: Dash, recorded: Recorded, training: Training, scheme: Any
) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size({"width": 360, "height": 740})
    views = {
        "": "table.runs tbody tr", f"&run={recorded.day}": ".legend b", f"&run={training.run_id}": ".workers tbody td",
        f"&compare={recorded.hostile[2]},{recorded.others[0]},{training.run_id}": ".comparison .legend li",
    }  # fmt: skip
    for fragment, settled in views.items():
        open_page(page, dash, fragment)
        page.locator(settled).first.wait_for()
        assert widest(page) == 360, fragment
        page.set_viewport_size({"width": 1280, "height": 900})
        assert faint_texts(page) == [], fragment
        page.set_viewport_size({"width": 360, "height": 740})
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper)[:3])) > 384) == (scheme == "light")


def test_the_page_is_small_and_loads_nothing_from_outside() -> None:
    import penstock.web as room

    files = list((Path(str(room.__file__)).parent / "static").iterdir())
    assert sum(each.stat().st_size for each in files) < 150_000
    texts = {each.name: each.read_text(encoding="utf-8") for each in files}
    for name, text in texts.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), name
        assert set(re.findall(r"https?://[^\s'\"]+", text)) <= {"http://www.w3.org/2000/svg"}, name
