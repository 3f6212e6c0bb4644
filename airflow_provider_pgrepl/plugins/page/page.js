// The page "Replication". Text from the server becomes text nodes only, never markup.

const HERE = new URL("./", document.baseURI);
const AIRFLOW = new URL("../", HERE);
const REFRESH_MS = 10_000;
const POLL_MS = 2_000;
const STATES = ["errored", "snapshotting", "pending", "catching_up", "paused", "streaming", "removed"];
const main = document.getElementById("main");

// ---------------------------------------------------------------- elements

function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== ""));
  return element;
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const badge = (state, kind = state) => el("span", { class: `badge ${kind}` }, state.replaceAll("_", " "));
const label = (text, ...children) => el("div", {}, el("span", { class: "label" }, text), ...children);
const hash = (...parts) => "#/" + parts.map(encodeURIComponent).join("/");

// Airflow shows the page in a sandboxed frame, whose links cannot leave it: its router is asked instead.
function airflowLink(path, text) {
  const href = new URL(path, AIRFLOW).href;
  const follow = (event) => {
    if (window.parent === window || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    window.parent.history.pushState(null, "", href);
    window.parent.dispatchEvent(new PopStateEvent("popstate", { state: null }));
  };
  return el("a", { href, onclick: follow }, text);
}

const runPath = (dag, run) => `dags/${encodeURIComponent(dag)}/runs/${encodeURIComponent(run)}`;

function taskLinks(task) {
  if (!task) return null;
  const run = runPath(task.dag, task.run);
  return el("span", { class: "links" },
    airflowLink(`dags/${encodeURIComponent(task.dag)}`, task.dag),
    airflowLink(run, "run"),
    airflowLink(`${run}/tasks/${encodeURIComponent(task.task)}?try_number=${encodeURIComponent(task.try)}`, "log"));
}

// ---------------------------------------------------------------- values

function bytes(count) {
  if (count == null) return "–";
  const units = ["B", "kiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (count >= 1024 && power < units.length - 1) { count /= 1024; power += 1; }
  return `${count < 10 && power ? count.toFixed(1) : Math.round(count).toLocaleString("en")} ${units[power]}`;
}

function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86_400)} d`;
}

const { compare: byName } = new Intl.Collator("en", { numeric: true });
const whole = (number) => (number == null ? "–" : Math.round(number).toLocaleString("en"));

const age = (text) => `${duration(Math.max(0, (Date.now() - Date.parse(text)) / 1000))} ago`;
const ago = (text, none = "–") => (text ? el("time", { datetime: text, title: new Date(text).toLocaleString() }, age(text)) : none);

// What has not changed is not built again, and grows older.
function refreshAges() {
  for (const time of main.querySelectorAll("time")) time.textContent = age(time.dateTime);
}

// Samples are some ten minutes apart, and kept for a day here: a table's newest changes are in none yet.
function lastChange({ moved_at: moved, snapshot_at: copied }) {
  if (moved) return ago(moved);
  if (!copied) return "–";
  return Date.now() - Date.parse(copied) > 24 * 3_600_000 ? "over 24 h ago" : "none sampled";
}

function sparkline(values, title) {
  const known = values.filter((value) => value != null);
  if (!known.length) return el("span", { class: "quiet" }, "no samples in 24 h");
  const top = Math.max(...known, 1);
  const step = 100 / Math.max(values.length - 1, 1);
  const lines = [];
  let line = [];
  values.forEach((value, index) => {
    if (value == null) { if (line.length) lines.push(line); line = []; return; }
    line.push([index * step, 29 - (value / top) * 27]);
  });
  if (line.length) lines.push(line);
  const points = (one) => one.map(([x, y]) => `${x.toFixed(2)},${y.toFixed(2)}`).join("L");
  const text = `${title} in 24 h: at most ${duration(Math.max(...known))}`;
  return svg("svg", { class: "spark", viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img", "aria-label": text },
    svg("path", { class: "base", d: "M0,29.5L100,29.5" }),
    ...lines.map((one) => svg("path", { class: "area", d: `M${one[0][0]},30L${points(one)}L${one.at(-1)[0]},30Z` })),
    ...lines.map((one) => svg("path", { d: `M${points(one.length > 1 ? one : [one[0], [one[0][0] + 0.5, one[0][1]]])}` })));
}

// ---------------------------------------------------------------- data

async function get(path, parameters = {}, root = HERE) {
  const url = new URL(path, root);
  for (const [name, value] of Object.entries(parameters)) url.searchParams.append(name, value);
  return answered(await fetch(url, { headers: { Accept: "application/json" } }));
}

async function answered(response) {
  const body = await response.json().catch(() => ({}));
  if (response.ok) return body;
  const known = { 401: "Your session has ended. Reload Airflow and sign in.", 403: "You have no permission for this." };
  const detail = typeof body.detail === "string" ? body.detail : JSON.stringify(body.detail ?? response.statusText);
  const error = new Error(known[response.status] ?? `Airflow answered ${response.status}: ${detail}`);
  throw Object.assign(error, { status: response.status });
}

const answers = new Map(); // the last answer about pipelines of each database

async function askDatabases(show) {
  const { databases } = await get("api/databases");
  for (const known of answers.keys()) if (!databases.includes(known)) answers.delete(known);
  if (!databases.length) show();
  await Promise.all(databases.map(async (database) => {
    const answer = await get("api/pipelines", { database }).catch((error) => ({ error: { reason: error.message } }));
    answers.set(database, answer);
    show();
  }));
}

function allPipelines() {
  const seen = new Map(); // two connections may lead to one database
  for (const database of [...answers.keys()].sort()) {
    for (const pipeline of answers.get(database).pipelines ?? []) {
      if (!seen.has(pipeline.id)) seen.set(pipeline.id, { ...pipeline, database });
    }
  }
  return [...seen.values()];
}

const trouble = (pipeline) => pipeline.problems.reduce((sum, one) => sum + (one.severity === "failure" ? 1000 : 1), 0);

// ---------------------------------------------------------------- pipelines

function pipelinesView() {
  const notices = el("div");
  const list = el("ul", { class: "cards", "aria-label": "Pipelines" });
  main.replaceChildren(notices, list);
  const shown = new Keyed(list, (one) => `${one.database}/${one.id}`, pipelineCard);
  const show = () => {
    notices.replaceChildren(...[...answers].filter(([, answer]) => answer.error).map(([database, { error }]) =>
      el("div", { class: "notice" }, el("strong", {}, database), " ", el("span", { class: "wrap" }, error.reason),
        el("div", { class: "quiet wrap" }, error.hint ?? ""))));
    const found = allPipelines().sort((a, b) => trouble(b) - trouble(a) || byName(a.name, b.name));
    shown.show(found);
    if (!found.length && !notices.childElementCount) {
      notices.append(el("div", { class: "notice calm" }, "No pipeline is recorded. Run the DAG that takes the first snapshot."));
    }
  };
  if (answers.size) show();
  return () => askDatabases(show);
}

function pipelineCard(pipeline) {
  const { sample, last_error: error } = pipeline;
  const severity = pipeline.problems[0]?.severity ?? "fine";
  const states = STATES.filter((state) => pipeline.tables[state]);
  const problems = pipeline.problems.map((one) =>
    el("li", { class: one.severity === "failure" ? "bad wrap" : "warn wrap" }, one.reason));
  return el("li", { class: `card ${severity}` },
    el("div", { class: "title" },
      el("h2", {}, el("a", { href: hash(pipeline.database, pipeline.name) }, pipeline.name)),
      el("div", { class: "chips" }, badge(pipeline.state), ...states.map((state) =>
        el("a", { class: `badge ${state}`, href: hash(pipeline.database, pipeline.name) + `?state=${state}` },
          `${whole(pipeline.tables[state])} ${state.replaceAll("_", " ")}`)))),
    el("div", { class: "lag" }, el("span", { class: "label" }, "Lag"), sample ? [
      el("span", { class: "big number" }, duration(sample.lag_seconds)),
      el("span", { class: "quiet number" }, ` ${bytes(sample.lag_bytes)}`)] : null, sparkline(pipeline.lags, "Lag")),
    label("Throughput", sample ? [el("span", { class: "number" }, `${whole(pipeline.changes_per_s)} changes/s`), el("br"),
      el("span", { class: "quiet number" }, `${bytes(sample.bytes_per_s)}/s`)] : "–"),
    label("Retained WAL", wal(sample), el("span", { class: "quiet" }, "reported ", ago(pipeline.reported_at, "never"))),
    problems.length ? el("ul", { class: "whole" }, problems) : null,
    error ? el("div", { class: "whole" }, el("span", { class: "label" }, "Last error, ", ago(error.time)),
      el("div", { class: "wrap" }, error.table ? `${error.table}: ` : "", el("strong", {}, error.error), ": ", error.reason),
      el("div", { class: "quiet wrap" }, error.hint)) : null,
    pipeline.run?.task ? el("div", { class: "whole links" },
      el("span", { class: "quiet" }, pipeline.run.kind, " ", ago(pipeline.run.time)), taskLinks(pipeline.run.task)) : null);
}

function wal(sample) {
  const held = sample?.wal_retained_bytes;
  if (held == null) return el("div", {}, "–");
  const limit = sample.wal_limit_bytes;
  if (!limit) return el("div", { class: "number" }, bytes(held), el("span", { class: "quiet" }, ", no limit"));
  return el("div", { class: "number" }, `${bytes(held)} of ${bytes(limit)}`, el("br"),
    el("meter", { min: 0, max: limit, low: limit / 2, high: limit * 0.8, optimum: 0, value: held, "aria-label": "Retained WAL" }));
}

// Shows items in order, and builds only those nodes again whose item has changed.
class Keyed {
  constructor(parent, key, build) { Object.assign(this, { parent, key, build, nodes: new Map() }); }

  show(items) {
    const next = new Map();
    for (const item of items) {
      const key = this.key(item);
      const text = JSON.stringify(item);
      const known = this.nodes.get(key);
      next.set(key, known?.text === text ? known : { text, node: this.build(item) });
    }
    this.nodes = next;
    const wanted = [...next.values()].map((one) => one.node);
    const focused = this.parent.contains(document.activeElement) ? document.activeElement : null;
    if (wanted.length !== this.parent.childElementCount || wanted.some((node, index) => node !== this.parent.children[index])) {
      this.parent.replaceChildren(...wanted);
      if (focused?.isConnected) focused.focus({ preventScroll: true });
    }
  }
}

// ---------------------------------------------------------------- tables of a pipeline

const COLUMNS = [
  { key: "table", title: "Table", of: () => 0 },
  { key: "state", title: "State", of: (row) => STATES.indexOf(row.state) },
  { key: "since", title: "Since", of: (row) => -Date.parse(row.since) },
  { key: "rows_copied", title: "Rows", of: (row) => row.rows_copied ?? -1, right: true, hint: "Rows of the last snapshot" },
  { key: "lag_seconds", title: "Lag", of: (row) => row.lag_seconds ?? -1, right: true, hint: "Age of the oldest change that is not merged" },
  { key: "live_bytes", title: "Live / kept", of: (row) => row.live_bytes ?? -1, right: true, hint: "Bytes of the newest version, and of removed files that are kept" },
  { key: "moved_at", title: "Last change", of: (row) => -(Date.parse(row.moved_at) || 0), hint: "When the table's position last changed, from samples" },
  { key: "snapshot_at", title: "Snapshot", of: (row) => -(Date.parse(row.snapshot_at) || 0) },
];

function tablesView(database, pipeline, query) {
  const picked = new Set();
  const sort = { column: COLUMNS[1], down: false };
  const wanted = { text: "", state: new URLSearchParams(query).get("state") };
  let rows = [];
  const notice = el("div");
  const states = el("span", { class: "chips", role: "group", "aria-label": "States" });
  const search = el("input", { type: "search", placeholder: "Filter tables", "aria-label": "Filter tables", oninput: () => { wanted.text = search.value.toLowerCase(); show(); } });
  const all = el("input", { type: "checkbox", "aria-label": "Select all shown tables", onchange: () => { for (const row of visible()) all.checked ? picked.add(row.table) : picked.delete(row.table); show(true); } });
  const actions = actionBar({ database, pipeline }, () => rows.filter((row) => picked.has(row.table)));
  const count = el("span", { class: "quiet number", role: "status" });
  const head = el("div", { class: "row head", role: "row" }, el("span", { role: "columnheader" }, all), ...COLUMNS.map((column) => {
    const button = el("button", { type: "button", title: column.hint, onclick: () => { sort.down = sort.column === column && !sort.down; sort.column = column; show(); } }, column.title);
    return el("span", { role: "columnheader", class: `cell ${column.right ? "right" : ""}`, "data-key": column.key }, button);
  }));
  const body = el("div", { class: "body", role: "rowgroup", onkeydown: moveFocus });
  main.replaceChildren(notice, el("div", { class: "tools" }, search, states, pipelineBar({ database, pipeline }),
    el("div", { class: "selection" }, count, actions.node)),
    el("div", { class: "list", role: "table", "aria-label": `Tables of ${pipeline}` }, el("div", { role: "rowgroup" }, head), body));
  const shown = new Keyed(body, (row) => row.table, (row) => tableRow(database, pipeline, row, picked, changed));

  function visible() {
    return rows.filter((row) => (!wanted.state || row.state === wanted.state)
      && (!wanted.text || `${row.table} ${row.error} ${row.reason}`.toLowerCase().includes(wanted.text)));
  }
  function changed() {
    const found = visible();
    all.checked = found.length > 0 && found.every((row) => picked.has(row.table));
    all.indeterminate = !all.checked && found.some((row) => picked.has(row.table));
    actions.update();
    count.textContent = picked.size === 1 ? "1 table selected" : `${picked.size ? whole(picked.size) : "No"} tables selected`;
  }
  function show(isForced = false) {
    if (isForced) shown.nodes.clear();
    const order = sort.down ? -1 : 1;
    const { of } = sort.column;
    const compare = (a, b) => (of(a) < of(b) ? -order : of(a) > of(b) ? order : order * byName(a.table, b.table));
    shown.show(visible().sort(compare));
    for (const cell of head.querySelectorAll("[data-key]")) {
      const isSorted = cell.dataset.key === sort.column.key;
      cell.setAttribute("aria-sort", isSorted ? (sort.down ? "descending" : "ascending") : "none");
      cell.firstChild.textContent = COLUMNS.find((one) => one.key === cell.dataset.key).title + (isSorted ? (sort.down ? " ↓" : " ↑") : "");
    }
    states.replaceChildren(...STATES.filter((state) => state === wanted.state || rows.some((row) => row.state === state)).map((state) =>
      el("button", { type: "button", "aria-pressed": String(wanted.state === state), onclick: () => { wanted.state = wanted.state === state ? null : state; show(); } },
        `${state.replaceAll("_", " ")} ${whole(rows.filter((row) => row.state === state).length)}`)));
    changed();
  }
  return async () => {
    const answer = await get("api/tables", { database, pipeline });
    notice.replaceChildren(...errorNotice(answer.error));
    if (!answer.tables) return;
    rows = answer.tables;
    for (const name of picked) if (!rows.some((row) => row.table === name)) picked.delete(name);
    show();
  };
}

function tableRow(database, pipeline, row, picked, changed) {
  const box = el("input", { type: "checkbox", "aria-label": `Select ${row.table}`, onchange: () => { box.checked ? picked.add(row.table) : picked.delete(row.table); changed(); } });
  box.checked = picked.has(row.table);
  const cell = (title, content, kind = "") => el("span", { role: "cell", class: `cell number ${kind}`, "data-label": title }, content);
  return el("div", { class: "row", role: "row" }, el("span", { role: "cell" }, box),
    el("span", { role: "cell", class: "name" }, el("a", { href: hash(database, pipeline, row.schema, row.name) }, row.table)),
    cell("", badge(row.state), "state"), cell("since", ago(row.since)), cell("rows", whole(row.rows_copied), "right"),
    cell("lag", duration(row.lag_seconds), "right"),
    cell("live / kept", `${bytes(row.live_bytes)} / ${bytes(row.kept_bytes)}`, "right"),
    cell("changed", lastChange(row)), cell("snapshot", ago(row.snapshot_at)),
    row.copying ? el("div", { class: "detail", role: "cell" }, copying(row.copying)) : null,
    row.reason || row.error ? el("div", { class: "detail", role: "cell" },
      el("div", { class: "wrap bad" }, el("strong", {}, row.error), row.error ? ": " : "", row.reason),
      hintOf({ database, pipeline }, row)) : null);
}

// Hints name commands and operators, since they are read in logs, too: here follow the buttons of the same actions.
function hintOf(pipeline, { table, hint }) {
  const named = ACTIONS.filter((action) => action.command && hint?.includes(action.command));
  return el("div", { class: "quiet" }, el("span", { class: "wrap" }, hint ?? ""),
    named.length ? el("span", { class: "chips", role: "group", "aria-label": `Actions of the hint for ${table}` },
      ...named.map((action) => actionButton(action, pipeline, () => [table]))) : null);
}

const copying = ({ text, done }) => el("div", { class: "quiet" },
  el("progress", { max: 1, value: done, "aria-label": "Copied bytes" }), ` copying ${text}`);

function moveFocus(event) {
  const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
  const next = step && event.target.closest(".row")?.[step];
  if (!next) return;
  event.preventDefault();
  next.querySelector(event.target.matches("input") ? "input" : "a").focus();
}

const errorNotice = (error) => (error ? [el("div", { class: "notice" }, el("span", { class: "wrap" }, error.reason), el("div", { class: "quiet wrap" }, error.hint ?? ""))] : []);

// ---------------------------------------------------------------- one table

function tableView(database, pipeline, schema, name) {
  const place = el("div");
  let shownText = "";
  main.replaceChildren(place);
  return async () => {
    const [list, one] = await Promise.all([
      get("api/tables", { database, pipeline }), get("api/table", { database, pipeline, schema, name })]);
    const row = list.tables?.find((found) => found.schema === schema && found.name === name);
    const text = JSON.stringify([row, one]);
    if (text === shownText) return;
    shownText = text;
    place.replaceChildren(...errorNotice(list.error ?? one.error),
      ...(row ? tableFacts({ database, pipeline }, row, one.lags ?? []) : [el("p", {}, "This table is not recorded.")]),
      ...(one.events ? [...publishersOf(one), ...columnsOf(one), ...eventsOf("Schema changes", one.events.filter((event) => event.kind === "schema_changed")), ...eventsOf("History", one.events)] : []));
  };
}

function tableFacts(pipeline, row, lags) {
  const actions = actionBar(pipeline, () => [row], ACTIONS.filter((action) => !action.asks));
  actions.update();
  const fact = (title, ...content) => label(title, el("span", { class: "number" }, ...content));
  return [el("div", { class: "tools" }, badge(row.state), el("span", { class: "space" }), actions.node),
    row.error || row.reason ? el("div", { class: "notice" }, el("div", { class: "wrap" }, el("strong", {}, row.error), row.error ? ": " : "", row.reason), hintOf(pipeline, row)) : "",
    row.copying ? copying(row.copying) : "",
    el("div", { class: "facts" }, fact("Since", ago(row.since)), fact("Rows of the last snapshot", whole(row.rows_copied)),
      fact("Last snapshot", ago(row.snapshot_at)), fact("Last change", lastChange(row)),
      fact("Found equal", ...(row.verified_at ? [ago(row.verified_at), ` at ${row.verified_through}`] : ["not yet"])),
      fact("Live", bytes(row.live_bytes)), fact("Kept", bytes(row.kept_bytes)), fact("Lag", duration(row.lag_seconds)),
      fact("Selected by", row.membership === "configured" ? "pipeline file" : row.membership), row.lsn ? fact("LSN of the error", row.lsn) : "",
      el("div", {}, el("span", { class: "label" }, "Lag in 24 h"), sparkline(lags, "Lag")))];
}

function publishersOf({ publishers }) {
  if (!publishers.length) return [];
  return [el("h2", {}, "Publishers"), el("table", { class: "publishers" },
    el("thead", {}, el("tr", {}, ...["Publisher", "Target", "Published up to", "Reported"].map((title) => el("th", { scope: "col" }, title)))),
    el("tbody", {}, ...publishers.map((one) => el("tr", {}, el("td", {}, one.name), el("td", {}, one.target),
      el("td", {}, el("span", { class: "number" }, one.stopped ? one.stopped.after : one.published_lsn),
        one.stopped ? el("div", { class: "wrap bad" }, el("strong", {}, one.stopped.error), ": ", one.stopped.reason, el("div", { class: "quiet" }, one.stopped.hint)) : ""),
      el("td", { class: "quiet" }, ago(one.reported_at), ` by ${one.holder}`)))))];
}

function columnsOf({ columns }) {
  if (!columns.length) return [];
  return [el("h2", {}, `Columns (${columns.length})`), el("table", {},
    el("thead", {}, el("tr", {}, ...["Column", "PostgreSQL type", ""].map((title) => el("th", { scope: "col" }, title)))),
    el("tbody", {}, ...columns.map((column) => el("tr", {}, el("td", {}, column.name), el("td", {}, column.type),
      el("td", { class: "quiet" }, [column.is_key && "key", column.not_null && "not null"].filter(Boolean).join(", "))))))];
}

function eventsOf(title, events) {
  if (!events.length) return [];
  return [el("h2", {}, title), el("ol", { class: "events" }, ...events.map((event) => {
    const facts = Object.entries(event.details).map(([name, value]) =>
      `${name} ${name === "bytes" ? bytes(value) : typeof value === "object" ? JSON.stringify(value) : value}`);
    const what = event.to_state ? [event.from_state ? badge(event.from_state) : "new", " → ", badge(event.to_state)] : [el("strong", {}, event.kind.replaceAll("_", " "))];
    return el("li", { class: event.to_state === "errored" ? "bad-event" : "" },
      el("div", {}, ...what, " ", ago(event.time), el("span", { class: "quiet wrap" }, event.lsn ? ` at ${event.lsn}` : "", facts.length ? `, ${facts.join(", ")}` : "")),
      event.error || event.reason ? el("div", { class: "wrap bad" }, event.error, event.error ? ": " : "", event.reason) : "",
      event.hint ? el("div", { class: "wrap quiet" }, event.hint) : "",
      el("div", { class: "quiet wrap" }, event.actor, " ", taskLinks(event.task)));
  }))];
}

// ---------------------------------------------------------------- actions: runs of DAGs, with the user's own session

// With `states`, an action is for tables in these alone. `conf`: the parameters of its run for some tables; without
// it, the action's id and the tables.
const ACTIONS = [
  { id: "pause", title: "Pause", states: ["catching_up", "streaming"], about: "Changes stay in the changelog and are not applied until the tables are resumed." },
  { id: "resume", title: "Resume", states: ["paused"], command: "pgrepl resume ", about: "Apply the changes of paused tables." },
  { id: "retry", title: "Retry", states: ["errored"], command: "pgrepl retry ", about: "Continue errored tables from the changelog, without a new copy." },
  { id: "maintain", title: "Maintain", about: "Compact small files and delete unreferenced files." },
  { id: "resnapshot", title: "Resnapshot", command: "pgrepl snapshot FILE.json --tables ", danger: "The rows of these lake tables are replaced by a new copy. The copy reads the source.", conf: (tables) => ({ tables }) },
  { id: "verify", title: "Verify", about: "Compare these lake tables with the source at one LSN, while replication runs. The run fails if rows differ, and its log counts them.", conf: (tables) => ({ tables, repair: false }) },
  { id: "repair", title: "Repair", danger: "Rows of these lake tables that differ from the source are replaced by the source's.", conf: (tables) => ({ tables, repair: true }) },
  { id: "add", title: "Add…", asks: true, about: "Copy these tables, and keep them current." },
  { id: "remove", title: "Remove", command: "pgrepl remove ", danger: "These tables are no longer replicated. Their lake tables stay as they are; to replicate them again, they are copied again." },
];

// Actions on a whole pipeline. Each field is a parameter of the DAG.
const PIPELINE_ACTIONS = [
  { id: "check", title: "Check a migration…", about: "Apply the SQL to a copy of the source's schema, and roll it back. The run fails if a table could not continue.",
    fields: [{ name: "sql", title: "SQL of the migration", rows: 8 }] },
  { id: "skip", title: "Skip a transaction…", danger: "The transaction is lost for the lake. Every table that it may have changed becomes errored, and needs a resnapshot. Pause the replication first.",
    fields: [{ name: "lsn", title: "LSN of the transaction, as the error names it", rows: 1 }, { name: "unchanged_tables", title: "Tables that it did not change, one a line", rows: 4, isList: true }] },
];

const OFFERS = {
  resnapshot: (params) => params.tables && !params.action && !params.new_epoch && !params.show_keys,
  verify: (params) => params.tables && params.show_keys,
  repair: (params) => params.tables && params.repair,
  check: (params) => params.sql,
  skip: (params) => params.lsn && params.unchanged_tables,
};

function pipelineBar(pipeline) {
  return el("span", { class: "chips end", role: "group", "aria-label": "Actions on the pipeline" },
    ...PIPELINE_ACTIONS.map((action) => actionButton(action, pipeline, () => [])));
}

const linesOf = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

function actionButton(action, pipeline, tables) {
  const title = action.states ? `For tables that are ${action.states.join(" or ").replaceAll("_", " ")}` : null;
  return el("button", { type: "button", class: action.danger ? "danger" : "", title, onclick: () => ask(action, pipeline, tables()) }, action.title);
}

function actionBar(pipeline, rows, offered = ACTIONS) {
  const tables = ({ asks, states }) => (asks ? [] : rows().filter((row) => !states || states.includes(row.state)).map((row) => row.table));
  const buttons = offered.map((action) => actionButton(action, pipeline, () => tables(action)));
  return {
    node: el("span", { class: "chips", role: "group", "aria-label": "Actions" }, ...buttons),
    update: () => buttons.forEach((button, index) => { button.disabled = !offered[index].asks && !tables(offered[index]).length; }),
  };
}

async function dagsFor(action) {
  const { dags } = await get("api/v2/dags", { tags: "pgrepl", limit: 100 }, AIRFLOW);
  const details = await Promise.all(dags.map((dag) => get(`api/v2/dags/${encodeURIComponent(dag.dag_id)}/details`, {}, AIRFLOW)));
  const offers = OFFERS[action.id] ?? ((params) => params.tables && params.action?.schema?.enum?.includes(action.id));
  return details.filter(({ params }) => offers(params ?? {}));
}

async function ask(action, pipeline, tables) {
  const dialog = document.getElementById("dialog");
  const start = el("button", { type: "submit", class: action.danger ? "main danger" : "main", disabled: true }, action.title.replace("…", ""));
  const problem = el("p", { class: "bad wrap", role: "alert" });
  const prompt = el("option", { value: "" }, "Loading DAGs…");
  const select = el("select", { required: true }, prompt);
  const names = action.asks ? el("textarea", { rows: 4, required: true, placeholder: "public.orders" }) : null;
  const fields = (action.fields ?? []).map((field) => ({ ...field, input: field.rows > 1 ? el("textarea", { rows: field.rows, required: !field.isList }) : el("input", { type: "text", required: true }) }));
  const what = action.fields ? "" : action.asks ? "tables" : tables.length === 1 ? "1 table" : `${tables.length} tables`;
  const sure = action.danger ? el("input", { type: "checkbox", required: true }) : null;
  const form = el("form", { method: "dialog" },
    el("h2", { id: "asked" }, `${action.title.replace("…", "")} ${what} of ${pipeline.pipeline} (connection ${pipeline.database})`),
    action.danger ? el("div", { class: "notice" }, action.danger) : el("p", { class: "quiet" }, action.about),
    ...fields.map((field) => el("label", {}, field.title, field.input)),
    names ? el("label", {}, "Tables, one a line", names) : el("ul", { class: "names" }, ...tables.map((name) => el("li", {}, name))),
    el("label", {}, "DAG", select),
    sure ? el("label", { class: "tick" }, sure, "I understand what this does") : "", problem,
    el("div", { class: "buttons" }, el("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), start));
  dialog.replaceChildren(form);
  dialog.showModal();
  let dags = [];
  const chosen = () => dags.find((dag) => dag.dag_id === select.value);
  select.addEventListener("change", () => { problem.textContent = chosen()?.is_paused ? "This DAG is paused: unpause it first, or the run waits." : ""; });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (chosen()?.is_paused) return;
    start.disabled = true;
    const listed = names ? linesOf(names.value) : tables;
    const given = Object.fromEntries(fields.map(({ name, isList, input }) => [name, isList ? linesOf(input.value) : input.value.trim()]));
    const conf = action.fields ? given : action.conf?.(listed) ?? { action: action.id, tables: listed };
    const on = action.fields ? `of ${pipeline.pipeline}` : listed.length === 1 ? listed[0] : `${listed.length} tables`;
    try {
      await trigger(select.value, conf, `${action.title.replace("…", "")} ${on}`);
      if (form.isConnected) dialog.close(); // after Cancel the dialog may have another form
    } catch (error) {
      problem.textContent = error.message;
      start.disabled = false;
    }
  });
  try {
    // Without the pipelines no DAG is chosen, and the user can still choose one.
    const [found] = await Promise.all([dagsFor(action), answers.size || askDatabases(() => {}).catch(() => {})]);
    const own = found.filter((dag) => dag.tags.some((tag) => tag.name === `pipeline:${pipeline.pipeline}`));
    dags = own.length ? own : found.filter((dag) => !dag.tags.some((tag) => tag.name.startsWith("pipeline:")));
    prompt.textContent = "Choose the DAG of this pipeline";
    select.append(...dags.map((dag) => el("option", { value: dag.dag_id }, dag.dag_id)));
    // Never guess among several pipelines: the run would change the tables of another one.
    // Its name is not enough: a copy of the state database has a pipeline of the same name.
    const known = allPipelines();
    const isOwn = own.length === 1 && known.filter((one) => one.name === pipeline.pipeline).length === 1;
    const sole = isOwn || (dags.length === 1 && known.length === 1) ? dags[0] : null;
    if (sole) { select.value = sole.dag_id; select.dispatchEvent(new Event("change")); }
    if (!dags.length) problem.textContent = `No DAG with the tag pgrepl offers this action for this pipeline, or you may not see it. Copy the examples: pgrepl dags --copy-to DIR`;
    start.disabled = !dags.length;
  } catch (error) {
    prompt.textContent = "The DAGs could not be loaded";
    problem.textContent = error.message;
  }
}

async function trigger(dag, conf, title) {
  const url = new URL(`api/v2/dags/${encodeURIComponent(dag)}/dagRuns`, AIRFLOW);
  const run = await answered(await fetch(url, {
    method: "POST", headers: { "Content-Type": "application/json", Accept: "application/json" },
    body: JSON.stringify({ logical_date: null, conf, note: "From the page Replication" }),
  }));
  followed.save([...followed.read(), { dag, run: run.dag_run_id, title }]);
  follow(dag, run.dag_run_id, title);
}

// The runs that this tab has started and that have not ended: after a reload they are shown again.
// Without storage, a reload forgets them.
const followed = {
  key: `pgrepl.runs of ${AIRFLOW.pathname}`,
  read() { try { return JSON.parse(sessionStorage.getItem(this.key)) ?? []; } catch { return []; } },
  save(runs) { try { sessionStorage.setItem(this.key, JSON.stringify(runs)); } catch { /* no storage */ } },
  forget(dag, run) { this.save(this.read().filter((one) => one.dag !== dag || one.run !== run)); },
};

async function follow(dag, run, title) {
  const place = document.getElementById("runs");
  const state = el("span", {});
  const about = el("div", { class: "quiet wrap" });
  const node = el("div", {}, el("div", { class: "top" }, el("strong", { class: "wrap" }, title), state,
    el("button", { type: "button", "aria-label": `Hide ${title}`, onclick: () => { followed.forget(dag, run); node.remove(); place.hidden = !place.childElementCount; } }, "×")),
    airflowLink(runPath(dag, run), `${dag}: run`), about);
  place.prepend(node);
  place.hidden = false;
  node.scrollIntoView({ block: "nearest" }); // on a phone it is at the top
  while (node.isConnected) {
    try {
      const found = await get(`api/v2/dags/${encodeURIComponent(dag)}/dagRuns/${encodeURIComponent(run)}`, {}, AIRFLOW);
      state.replaceChildren(badge(found.state, found.state === "running" ? "run-running" : found.state));
      about.textContent = found.start_date ? `for ${duration((Date.parse(found.end_date ?? new Date().toISOString()) - Date.parse(found.start_date)) / 1000)}` : "waiting to start";
      if (found.state === "success" || found.state === "failed") { followed.forget(dag, run); refresh(); return; }
    } catch (error) {
      about.textContent = error.message;
      if (error.status === 403 || error.status === 404) { followed.forget(dag, run); return; }
    }
    await new Promise((done) => { setTimeout(done, POLL_MS); });
  }
}

// ---------------------------------------------------------------- routes, refresh, theme

let update = async () => {};
let turn = 0;

function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [database, pipeline, schema, name] = path.split("/").filter(Boolean).map(decodeURIComponent);
  const crumbs = [["Replication", hash()]];
  if (pipeline !== undefined) crumbs.push([pipeline, hash(database, pipeline)]);
  if (name !== undefined) crumbs.push([`${schema}.${name}`, ""]);
  const last = crumbs.length - 1;
  document.getElementById("path").replaceChildren(...crumbs.map(([text, href], index) =>
    (index < last ? el("a", { href }, text) : el("span", {}, text))));
  main.replaceChildren(el("p", { class: "quiet" }, "Loading…"));
  if (name !== undefined) update = tableView(database, pipeline, schema, name);
  else if (pipeline !== undefined) update = tablesView(database, pipeline, query);
  else update = pipelinesView();
  refresh();
}

async function refresh() {
  const mine = (turn += 1);
  const status = document.getElementById("updated");
  try {
    await update();
    refreshAges();
    if (mine === turn) status.textContent = `updated ${new Date().toLocaleTimeString()}`;
    if (mine === turn) document.documentElement.dataset.ready = "true";
  } catch (error) {
    if (mine === turn) status.textContent = error.message;
  }
}

// Airflow's own switch, if the page is inside Airflow; otherwise the system's setting decides.
function followTheme() {
  try {
    const outer = window.parent.document.documentElement;
    if (window.parent === window) return;
    const read = () => {
      const theme = ["dark", "light"].find((one) => outer.classList.contains(one) || outer.dataset.theme === one);
      if (theme) document.documentElement.dataset.theme = theme;
    };
    new MutationObserver(read).observe(outer, { attributes: true, attributeFilter: ["class", "data-theme"] });
    read();
  } catch { /* another origin: the system's setting decides */ }
}

document.addEventListener("keydown", (event) => {
  const search = main.querySelector("input[type=search]");
  if (event.key === "/" && search && !event.target.matches("input, textarea, select")) { event.preventDefault(); search.focus(); }
});
window.addEventListener("hashchange", () => { route(); main.focus({ preventScroll: true }); });
setInterval(() => { if (!document.hidden) refresh(); }, REFRESH_MS);
followTheme();
route();
for (const { dag, run, title } of followed.read()) follow(dag, run, title);
