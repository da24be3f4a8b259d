// The live page: follows v1/stream (one overview a second) and shows it. Text goes in as text, never as markup.
"use strict";
(() => {
  const AGAIN_MS = 2000, LATE_MS = 3500, ASK_MS = 5000, QUEUE_POINTS = 300;
  const $ = (id) => document.getElementById(id);
  const queue = [[], [], []];
  const plots = {};
  let lastAnswer = 0, lastWord = 0, shown = null;

  const text = (id, value) => { const node = $(id); if (node.textContent !== value) node.textContent = value; };
  const node = (name, content, style) => { const made = document.createElement(name); made.textContent = content; if (style) made.className = style; return made; };
  const tokens = (count) => count + (count === 1 ? " token" : " tokens");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function cells(row, values) {
    for (const value of values) {
      const cell = row.insertCell();
      if (value instanceof Node) cell.append(value); else cell.textContent = value;
    }
    return row;
  }

  function table(id, rows) {
    const fresh = document.createElement("tbody");
    for (const values of rows) cells(fresh.insertRow(), values);
    fresh.id = id;
    $(id).replaceWith(fresh);
    return fresh;
  }

  // lines: [label, colour, options], the last one on top.
  function plot(id, lines, data, range) {
    const box = $(id), width = Math.max(200, box.clientWidth);
    if (plots[id]) { plots[id].setData(data); return; }
    const axis = () => ({ stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } });
    const series = lines.map(([label, name, options]) => ({ label, stroke: colour(name), width: 2, spanGaps: true, ...options }));
    plots[id] = new uPlot({ width, height: 170, cursor: { show: false },
      legend: { live: false, markers: { width: 0, fill: (u, i) => colour(lines[i - 1][1]) } },
      scales: { x: { time: false }, y: range ? { range } : {} }, axes: [axis(), { ...axis(), size: 56 }],
      series: [{}, ...series] }, data, box);
  }

  // The first step waits for the engines to start: what nearly all steps took fills the picture.
  function usual(values) {
    const known = values.filter((v) => v !== null).sort((a, b) => a - b);
    return 1.2 * (known[Math.floor(0.98 * (known.length - 1))] || 1);
  }

  const seconds = (value) => (value < 10 ? value.toFixed(1) : Math.round(value)) + " s";
  function spread(s) {
    const t = s.trained.tokens, w = s.time_in_queue.waiting, words = [];
    if (t) words.push("Trained tokens: mean lag " + t.mean.toFixed(2) + ", p50 " + t.p50 + ", p95 " + t.p95 + ", largest " + t.max + ".");
    if (w) words.push("Waiting: p50 " + seconds(w.p50) + ", p95 " + seconds(w.p95) + ", oldest " + seconds(w.max) + ".");
    return words.join(" ");
  }

  function clear() { for (const id of Object.keys(plots)) { plots[id].destroy(); delete plots[id]; } }
  function redraw() { clear(); if (shown) draw(shown); }

  function meter(value, largest) {
    const bar = document.createElement("meter");
    bar.min = 0; bar.max = Math.max(1, largest); bar.value = value;
    bar.setAttribute("aria-label", tokens(value));
    return bar;
  }

  function show(o) {
    if (!shown || shown.run !== o.run) { clear(); for (const column of queue) column.length = 0; }
    shown = o;
    const s = o.staleness;
    document.title = o.diagnosis.verdict + " · Lagrange · " + o.run;
    text("run", o.run);
    text("headline", o.diagnosis.headline);
    const also = o.diagnosis.findings.filter((f) => f.verdict !== o.diagnosis.verdict).map((f) => f.verdict + ": " + f.because + "; " + f.change);
    if (also.join() !== [...$("also").children].map((line) => line.textContent).join())  // else it would be read out every second
      $("also").replaceChildren(...also.map((words) => node("li", words)));
    $("verdict").className = "verdict " + o.diagnosis.verdict;
    text("mode", o.progress.admission_paused ? "admission is paused" : o.progress.status === "draining" ? (o.progress.drained ? "drained" : "draining") : "");
    for (const [name, words] of Object.entries(o.tiles)) text(name, words);

    const waiting = new Map(s.waiting.by_lag.map((b) => [b.lag, b])), trained = new Map(s.trained.by_lag.map((b) => [b.lag, b]));
    const lags = [...new Set([...waiting.keys(), ...trained.keys()])].sort((a, b) => a - b);
    const most = Math.max(0, ...s.trained.by_lag.map((b) => b.tokens));
    table("lags", lags.map((lag) => {
      const w = waiting.get(lag), t = trained.get(lag);
      return [lag, w ? w.groups : 0, t ? t.groups : 0, t ? t.tokens : 0, meter(t ? t.tokens : 0, most)];
    }));
    text("spread", spread(s));
    const body = table("engines", o.fleet.engines.map((e) =>
      [e.engine_id, e.state, e.version < 0 ? "none" : e.version, e.publish_lag === null ? "" : e.publish_lag, e.detail]));
    o.fleet.engines.forEach((e, i) => { body.rows[i].cells[1].className = "state " + e.state; });
    const states = ["issued", "generating", "ready", "leased", "trained", "durable", "filtered", "stale", "failed"];
    table("ledger", states.map((name) => [name, s.groups[name], s.tokens[name]]));
    text("dead", s.dead_letters ? "Dead letters: " + s.dead_letters + ". `lagrange groups list RUN --state dead` has the reasons." : "");
    table("events", o.events.map((e) => [clock(e.time_ms), e.kind, e.text]));
    table("evaluations", o.evaluations.flatMap((e) => Object.entries(e.scores).map(([name, one]) =>
      [e.task, e.version, e.evaluation_lag, name + " " + one.value.toFixed(3), one.low.toFixed(3) + " to " + one.high.toFixed(3)])));
    text("closes", s.closes ? "closes" : "DOES NOT CLOSE");
    $("closes").className = s.closes ? "" : "open";

    queue[0].push(o.time_ms / 1000);
    queue[1].push(s.in_flight_groups);
    queue[2].push(s.ready_groups);
    if (queue[0].length > QUEUE_POINTS) for (const column of queue) column.shift();
    draw(o);
  }

  function draw(o) {
    const h = o.history, bound = o.staleness.max_lag, first = queue[0][0];
    const fromZero = (u, low, high) => [0, high || 1], fromZeroToOne = (u, low, high) => [0, Math.max(1, high)];
    if (h.step.length) {
      plot("plot-reward", [["reward", "--accent"]], [h.step, h.reward_mean]);
      plot("plot-lag", [["largest", "--warn", { width: 4 }], ["mean", "--accent"], ["bound now", "--bad", { dash: [4, 4] }]],
        [h.step, h.lag_max, h.lag_mean, h.step.map(() => bound)], (u, low, high) => [0, Math.max(1, bound, high)]);
      plot("plot-ratio", [["mean |log-ratio|", "--accent"]], [h.step, h.log_ratio_abs_mean], fromZero);
      plot("plot-shares", [["behind the gate", "--warn"], ["clipped", "--accent"]], [h.step, h.gate_rate, h.clip_fraction], fromZero);
      plot("plot-time", [["step", "--accent"], ["waiting", "--warn"]], [h.step, h.step_s, h.wait_s], (u) => [0, usual(u.data[1])]);
    }
    plot("plot-queue", [["in flight", "--warn", { width: 4 }], ["ready", "--accent"]], [queue[0].map((t) => t - first), queue[1], queue[2]], fromZeroToOne);
  }

  const clock = (ms) => new Date(ms).toISOString().slice(11, 19);
  function age() {
    const late = Date.now() - lastAnswer > LATE_MS;
    $("age").className = late ? "late" : "";
    text("age", !lastAnswer ? "no answer yet" : late ? "no answer since " + clock(lastAnswer) + " UTC" : "live");
    if (lastWord && Date.now() - lastWord > LATE_MS) silent("The monitor does not answer.");
  }

  // What is shown was so once: nothing may go on saying that all is well.
  function silent(words) {
    text("headline", words);
    if ($("also").children.length) $("also").replaceChildren();
    $("verdict").className = "verdict not-running";
    document.title = "no answer · Lagrange · " + $("run").textContent;
  }

  function follow() {
    const stream = new EventSource("v1/stream");
    stream.addEventListener("overview", (event) => { show(JSON.parse(event.data)); lastAnswer = lastWord = Date.now(); age(); read(); });
    stream.addEventListener("away", () => { lastWord = Date.now(); silent("Redis does not answer, or does not hold this run (yet)."); });
    // The browser connects again by itself unless the answer was an error.
    stream.addEventListener("error", () => { if (stream.readyState === EventSource.CLOSED) setTimeout(follow, AGAIN_MS); });
  }

  function spoken(sample) {
    const line = node("p", sample.reward.toFixed(2) + ", " + tokens(sample.tokens) + ", " + sample.finish + ":  ");
    for (const piece of sample.pieces) {
      const part = node("span", piece.text, piece.version === null ? "heard" : "");
      part.title = piece.version === null ? "environment" : "version " + piece.version;
      if (piece.version !== null) part.style.borderBottomColor = "oklch(.62 .16 " + (piece.version % 8) * 45 + ")";
      line.append(part);
    }
    return line;
  }

  function summary(g) {
    const mean = g.rewards.reduce((a, b) => a + b, 0) / Math.max(1, g.rewards.length);
    return "Prompt " + g.prompt_index + ", version " + g.version + (g.lag ? " (" + g.lag + " before the trainer's)" : "") + ", mean reward " + mean.toFixed(3) + (g.missing ? ", " + g.missing + " left out: no answer or no reward" : "") + (g.trace ? ", trace " + g.trace : "");
  }

  let shownGroups = "", lastRead = 0;
  async function read() {  // after an overview, so that nothing is asked of a Redis that is away
    if (Date.now() - lastRead < ASK_MS) return;
    lastRead = Date.now();
    const answer = await fetch("v1/samples", { signal: AbortSignal.timeout(ASK_MS) }).catch(() => null);
    if (!answer || !answer.ok) return;
    const { unrewarded, groups } = await answer.json(), now = groups.map((g) => g.group_id).join();
    text("unrewarded", unrewarded.failed ? unrewarded.failed + " of " + unrewarded.judged + " samples got no reward and are left out of their groups: " + unrewarded.newest : "");
    if (now === shownGroups) {  // a group that someone has opened stays open while nothing is new
      groups.forEach((g, i) => { $("samples").children[i].firstChild.textContent = summary(g); });
      return;
    }
    shownGroups = now;
    $("samples").replaceChildren(...groups.map((g) => {
      const box = document.createElement("details");
      box.append(node("summary", summary(g)));
      box.append(node("p", g.prompt, "heard"), ...g.samples.map(spoken));
      return box;
    }));
  }

  let resizing = 0;
  addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(redraw, 200); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  setInterval(age, 1000);
  follow();
})();
