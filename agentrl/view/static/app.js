"use strict";
// The pages: the run, the list of episodes, one episode, the comparison of two. They follow a run that is being written.

(function () {
  if (AR.single()) return;
  const h = AR.h;
  const main = document.getElementById("main");
  const live = document.getElementById("live");
  let state = null; // the server's state when this page was drawn
  let run = null;
  let page = null; // { name, refresh?, keys? }

  function search(query) {
    const params = new URLSearchParams(Object.entries(query || {}).filter(([, v]) => v !== "" && v !== null && v !== undefined));
    return params.size ? `?${params}` : "";
  }

  const link = (name, query) => `#/${name}${search(query)}`;

  async function get(path, query) {
    const response = await fetch(`api/${path}${search(query)}`);
    const value = await response.json();
    if (!response.ok || value.error) throw new Error(value.error || `status ${response.status}`);
    return value;
  }

  // Marks the moment at which a page is on the screen.
  const painted = (name) => requestAnimationFrame(() => setTimeout(() => performance.mark(`${name}-painted`)));

  const problem = (e) => h("p", { class: "error" }, AR.visible(e.message || e));

  // -- the run -----------------------------------------------------------------------------------------------------

  const FIRST = ["reward", "eval", "em", "turns", "sampled_tokens", "truncated_share", "flat_groups", "failures", "train/loss", "train/grad_norm", "train/kl", "train/entropy", "train/rollout_log_prob_diff_max"];
  const rank = (name) => {
    const at = FIRST.findIndex((f) => name === f || name.startsWith(`${f}/`));
    return at < 0 ? FIRST.length : at;
  };

  // What a line of metrics reports: a rollout, or an evaluation of one set.
  function kind(row) {
    const name = Object.keys(row).find((k) => k.startsWith("eval/"));
    return name ? name.split("/").slice(0, 2).join("/") : "rollout";
  }

  // Points [rollout, value, whether a line before it lacks the value] by name. Rollout N is step N - 1 of the files; an evaluation follows rollout N.
  function curves(rows) {
    const series = new Map();
    const seen = new Map(); // lines of each kind so far
    for (const row of rows) {
      const of = kind(row);
      const number = (seen.get(of) || 0) + 1;
      seen.set(of, number);
      for (const [k, v] of Object.entries(row)) {
        if (k === "step" || typeof v !== "number") continue;
        if (!series.has(k)) series.set(k, { points: [], last: number - 1 });
        const one = series.get(k);
        one.points.push([of === "rollout" ? row.step + 1 : row.step, v, one.last !== number - 1]);
        one.last = number;
      }
    }
    const named = [...series].map(([k, one]) => [k, one.points]);
    return named.filter(([, p]) => p.some(([, v]) => v !== p[0][1]) || p.length === 1).sort((a, b) => rank(a[0]) - rank(b[0]) || (a[0] < b[0] ? -1 : 1));
  }

  function svgElement(name, attributes) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [k, v] of Object.entries(attributes)) element.setAttribute(k, v);
    return element;
  }

  // A curve with axes. It has gaps where values are missing; the pointer shows the value of the nearest rollout.
  function chart(name, points) {
    const svg = svgElement("svg", { viewBox: "0 0 300 100", preserveAspectRatio: "none", role: "img", "aria-label": `${name} over rollouts` });
    const xs = points.map((p) => p[0]);
    const ys = points.map((p) => p[1]);
    const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
    const [y0, y1] = [Math.min(...ys), Math.max(...ys)];
    const x = (v) => 2 + (296 * (v - x0)) / (x1 - x0 || 1);
    const y = (v) => 96 - (92 * (v - y0)) / (y1 - y0 || 1);
    const at = (p) => `${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`;
    const alone = (i) => (i === 0 || points[i][2]) && (i + 1 === points.length || points[i + 1][2]);
    for (const level of [4, 50, 96]) svg.append(svgElement("path", { class: "grid", d: `M2 ${level}H298` }));
    svg.append(svgElement("path", { class: "axis", d: "M2 2V98H298" }));
    svg.append(svgElement("path", { class: "curve", d: points.map((p, i) => `${i && !p[2] ? "L" : "M"}${at(p)}${alone(i) ? "h0.1" : ""}`).join("") }));
    const cursor = svgElement("path", { class: "cursor", d: "" });
    svg.append(cursor);
    const last = points[points.length - 1];
    const value = h("span", { class: "value" }, AR.number(last[1]));
    const show = (p) => {
      cursor.setAttribute("d", p ? `M${x(p[0]).toFixed(1)} 2V98` : "");
      value.textContent = p ? `rollout ${p[0]}: ${AR.number(p[1])}` : AR.number(last[1]);
    };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const wanted = (300 * (event.clientX - box.left)) / box.width;
      show(points.reduce((best, p) => (Math.abs(x(p[0]) - wanted) < Math.abs(x(best[0]) - wanted) ? p : best)));
    });
    svg.addEventListener("pointerleave", () => show(null));
    const left = h("div", { class: "y-axis" }, h("span", {}, AR.number(y1)), h("span", {}, AR.number(y0)));
    const below = h("div", { class: "x-axis" }, h("span", {}, `${x0}`), h("span", {}, "rollout"), h("span", {}, `${x1}`));
    return h("figure", { class: "card curve-card" }, h("h3", {}, h("span", {}, AR.visible(name)), value), h("div", { class: "plot" }, left, svg, below));
  }

  // The result of the last rescore. A file of an older agentrl holds only the text.
  function rescored(r) {
    const title = h("h2", {}, "Last rescore");
    if (!r.means) return [title, h("div", { class: "card" }, h("pre", {}, AR.visible(r.text)))];
    const row = (name, a, b) => h("tr", {}, h("td", {}, name), h("td", { class: "n" }, AR.number(a)), h("td", { class: "n" }, AR.number(b)), h("td", { class: a === null || b === null || a === b ? "n" : b > a ? "n good" : "n bad" }, a === null || b === null ? "–" : `${b > a ? "+" : ""}${AR.number(b - a)}`));
    const table = (id, first, rows) => h("div", { class: "card wide" }, h("table", { id }, h("thead", {}, h("tr", {}, h("th", {}, first), ["recorded", "now", "change"].map((t) => h("th", { class: "n" }, t)))), h("tbody", {}, rows)));
    const facts = [["episodes", r.episodes], ["groups", r.groups], ["changed scores", r.changed], ["pairs of one group that changed order", `${r.swapped} of ${r.pairs}`], ["reversed pairs", r.reversed], [`groups in which an advantage (${AR.visible(r.estimator)}) changed sign`, r.flipped_groups], ["failed rewards", r.failed.length]];
    return [
      title,
      h("div", { class: "facts" }, facts.map(([k, v]) => h("span", {}, `${k} `, h("b", {}, AR.number(v))))),
      table("rescored", "mean of", r.means.map(([name, a, b]) => row(AR.visible(name), a, b))),
      r.flipped.length ? [h("h3", {}, "Advantages that changed sign"), table("flipped", "episode", r.flipped.slice(0, 200).map(([, id, a, b]) => row(h("a", { href: link("episode", { id }) }, AR.visible(id)), a, b)))] : null,
      r.failed.length ? h("p", { class: "soft" }, `first failed reward, in episode ${AR.visible(r.failed[0][0])}: ${AR.visible(r.failed[0][1])}`) : null,
    ].flat().filter(Boolean);
  }

  async function showRun() {
    run = await get("run");
    state = run.state;
    const all = curves(run.metrics);
    const ends = run.table;
    const rest = all.slice(12);
    main.replaceChildren(...[
      h("h1", {}, AR.visible(run.name)),
      h("p", { class: "soft" }, `${run.state.episodes} episodes, ${run.state.steps} optimizer steps recorded${run.truncated ? `; ${run.truncated} incomplete record(s) skipped` : ""}`),
      run.note ? h("p", { class: "soft" }, AR.visible(run.note)) : null,
      all.length ? h("div", { class: "cards" }, all.slice(0, 12).map(([n, p]) => chart(n, p))) : h("p", { class: "soft" }, "no metrics yet"),
      rest.length ? h("details", {}, h("summary", {}, `${rest.length} more curves`), h("div", { class: "cards" }, rest.map(([n, p]) => chart(n, p)))) : null,
      h("h2", {}, "How episodes ended"),
      h("div", { class: "card" }, h("table", { id: "causes" }, h("thead", {}, h("tr", {}, ["split", "stop reason", "status"].map((t) => h("th", {}, t)), h("th", { class: "n" }, "count"), h("th", { class: "n" }, "share"), h("th", {}, "cause"))), h("tbody", {}, ends.map((f) => h("tr", {}, h("td", {}, AR.visible(f.split)), h("td", {}, h("a", { href: link("episodes", { split: f.split, stop: f.stop }) }, AR.visible(f.stop))), h("td", { class: f.status === "failed" ? "bad" : "" }, f.status), h("td", { class: "n" }, f.count), h("td", { class: "n" }, `${((100 * f.count) / Math.max(1, run.state.episodes)).toFixed(1)} %`), h("td", {}, AR.visible(f.cause))))))),
      ...(Object.keys(run.replay).length ? [h("h2", {}, "Last replay"), h("div", { class: "card", id: "replayed" }, Object.entries(run.replay).map(([k, n]) => h("p", {}, h("a", { href: link("episodes", { replay: k }) }, `${k}: ${n}`))))] : []),
      ...(run.rescore ? rescored(run.rescore) : []),
      run.config ? h("details", {}, h("summary", {}, "settings"), h("pre", {}, AR.visible(run.config))) : null,
    ].filter(Boolean));
    page = { name: "run", refresh: showRun };
    painted("run");
  }

  // -- the list ----------------------------------------------------------------------------------------------------

  const ROW = 30;
  const PAGE = 100;
  const COLUMNS = [["id", "episode", "92px"], ["step", "rollout", "48px", 1], ["split", "split", "64px"], ["stop", "ended", "92px"], ["score", "score", "48px", 1], ["turns", "turns", "42px", 1], ["sampled", "sampled", "58px", 1], ["tokens", "tokens", "50px", 1], ["seconds", "time", "56px", 1], ["version", "version", "52px", 1], ["advantage", "advantage", "68px", 1], ["replay", "replay", "68px"], ["text", "prompt", "minmax(120px, 1fr)"], ["answer", "answer", "minmax(80px, .4fr)"], ["label", "label", "minmax(60px, .3fr)"]];

  async function showList(query) {
    if (!run) run = await get("run");
    const columns = [...COLUMNS];
    columns.splice(5, 0, ...run.components.slice(0, 4).map((c) => [`rewards.${c}`, c, "48px", 1]));
    const grid = columns.map((c) => c[2]).join(" ");
    const pages = new Map();
    let total = 0;
    let here = 0;
    const body = h("div", { class: "list-body", tabindex: 0, role: "listbox", "aria-label": "episodes" });
    const tall = h("div");
    body.append(tall);
    const count = h("span", { class: "soft", id: "count" });
    const searchBox = h("input", { type: "search", placeholder: "search ids, prompts, answers, causes  ( / )", value: query.q || "", "aria-label": "search" });
    const choice = (name, label, values) => {
      const el = h("select", { "aria-label": label, "data-filter": name }, h("option", { value: "" }, label), values.map((v) => h("option", { value: v, selected: query[name] === v }, AR.visible(v))));
      el.addEventListener("change", () => go({ [name]: el.value }));
      return el;
    };
    const short = (name, label) => {
      const el = h("input", { class: "short", placeholder: label, value: query[name] || "", "aria-label": label, "data-filter": name });
      el.addEventListener("change", () => go({ [name]: el.value.trim() }));
      return el;
    };
    const go = (change) => {
      location.replace(link("episodes", { ...query, ...change }));
    };
    let waiting = 0;
    searchBox.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => {
        query = { ...query, q: searchBox.value };
        history.replaceState(null, "", link("episodes", query));
        reload();
      }, 150);
    });
    const head = h("div", { class: "list-head" }, columns.map(([key, label, , right]) => h("button", { type: "button", class: right ? "n" : "", "data-sort": key, disabled: key === "label", onclick: () => go({ sort: key, desc: query.sort === key && query.desc !== "1" ? "1" : query.sort === key ? "" : right ? "1" : "" }) }, `${AR.visible(label)}${query.sort === key ? (query.desc === "1" ? " ↓" : " ↑") : ""}`)));
    head.style.gridTemplateColumns = grid;

    async function need(n) {
      if (pages.has(n)) return;
      pages.set(n, null);
      try {
        const response = await get("episodes", { ...query, offset: n * PAGE, limit: PAGE });
        pages.set(n, response.rows);
        if (response.total !== total) resize(response.total);
        draw();
      } catch (e) {
        count.replaceChildren(problem(e));
      }
    }
    function resize(n) {
      total = n;
      tall.style.height = `${n * ROW}px`;
      count.textContent = `${n} episodes`;
      here = Math.min(here, Math.max(0, n - 1));
    }
    const rows = new Map();
    function draw() {
      const from = Math.max(0, Math.floor(body.scrollTop / ROW) - 5);
      const to = Math.min(total, Math.ceil((body.scrollTop + body.clientHeight) / ROW) + 5);
      for (const [i, el] of rows) {
        if (i < from || i >= to || el.waiting) {
          el.remove();
          rows.delete(i);
        }
      }
      for (let i = from; i < to; i++) {
        const data = pages.get(Math.floor(i / PAGE));
        if (!pages.has(Math.floor(i / PAGE))) need(Math.floor(i / PAGE));
        if (!rows.has(i)) {
          const row = data && data[i % PAGE];
          const el = row ? h("a", { class: "list-row", role: "option", href: link("episode", { ...query, id: row.id }), "data-id": row.id }, columns.map(([key, , , right]) => h("span", { class: `${right ? "n" : ""} ${key === "stop" && row.status === "failed" ? "bad" : ""}`, title: key === "text" || key === "answer" || key === "label" ? AR.visible(row[key] || "") : null }, cell(row, key)))) : h("div", { class: "list-row soft" }, "…");
          el.waiting = !row;
          el.style.gridTemplateColumns = grid;
          el.style.top = `${i * ROW}px`;
          rows.set(i, el);
          body.append(el);
        }
        rows.get(i).classList.toggle("here", i === here);
      }
    }
    function cell(row, key) {
      if (key.startsWith("rewards.")) return AR.number(row.rewards[key.slice(8)]);
      if (key === "step") return row.step === null || row.step === undefined ? "" : AR.number(row.split === "train" ? row.step + 1 : row.step);
      if (key === "seconds") return AR.seconds(row.seconds) || "–";
      if (key === "replay") return row.replay || "";
      return AR.visible(AR.number(row[key], 2));
    }
    async function reload() {
      pages.clear();
      for (const el of rows.values()) el.remove();
      rows.clear();
      await need(Math.floor(body.scrollTop / ROW / PAGE));
      if (!total) resize(0);
      draw();
    }
    function move(step) {
      here = Math.max(0, Math.min(total - 1, here + step));
      const y = here * ROW;
      if (y < body.scrollTop) body.scrollTop = y;
      if (y + ROW > body.scrollTop + body.clientHeight) body.scrollTop = y + ROW - body.clientHeight;
      draw();
    }
    body.addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });
    main.replaceChildren(
      h("div", { class: "bar" }, searchBox, choice("split", "all splits", run.splits), choice("stop", "all stop reasons", run.stops), short("step", "step"), short("group", "group"), short("least", "score ≥"), short("most", "score ≤"), Object.keys(run.replay).length ? choice("replay", "all replay results", ["differs", ...Object.keys(run.replay)]) : "", h("button", { type: "button", onclick: () => (location.hash = "#/episodes") }, "clear filters"), count),
      h("div", { class: "list" }, head, body),
    );
    const refresh = async () => {
      run = await get("run");
      await reload();
    };
    page = {
      name: "episodes",
      refresh,
      keys: {
        "/": () => searchBox.focus(),
        j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1), PageDown: () => move(20), PageUp: () => move(-20), Home: () => move(-total), End: () => move(total),
        Enter: () => rows.get(here) && rows.get(here).click(),
        c: () => rows.get(here) && mark(rows.get(here).dataset.id),
      },
    };
    await reload();
    body.focus({ preventScroll: true });
    painted("list");
  }

  // -- one episode -------------------------------------------------------------------------------------------------

  // The keys that choose a tab or a colour in all views.
  function tabKeys(views) {
    const each = (act) => () => views.forEach(act);
    const keys = { v: each((view) => view.tab("conversation")), t: each((view) => view.tab("tokens")), r: each((view) => view.tab("trained")) };
    for (let n = 0; n < 6; n++) keys[String(n + 1)] = each((view) => view.color(n));
    return keys;
  }

  async function showEpisode(query) {
    const id = query.id || "";
    const [e, [before, after]] = await Promise.all([get("episode", { id }), get("neighbours", query)]);
    const list = { ...query };
    delete list.id;
    const view = AR.episode(e);
    const to = (other) => other && (location.hash = link("episode", { ...query, id: other }));
    main.replaceChildren(
      h("div", { class: "bar" }, h("a", { href: link("episodes", list) }, "← list"), h("button", { type: "button", disabled: !before, onclick: () => to(before) }, "previous"), h("button", { type: "button", disabled: !after, onclick: () => to(after) }, "next"), h("button", { type: "button", onclick: () => mark(id) }, "compare with another"), e.group.length > 1 ? h("span", { class: "soft" }, "group: ", e.group.slice(0, 32).map((g) => [g === id ? h("b", {}, AR.visible(g)) : h("a", { href: link("episode", { ...query, id: g }) }, AR.visible(g)), " "])) : ""),
      h("h1", {}, `episode ${AR.visible(id)}`),
      view,
    );
    const keys = { ...tabKeys([view]), k: () => to(before), j: () => to(after), Escape: () => (location.hash = link("episodes", list)), c: () => mark(id) };
    const trained = e.training_step !== null;
    page = { name: "episode", keys, refresh: async () => { if (!trained && (await get("episode", { id })).training_step) await showEpisode(query); } };
    scrollTo(0, 0);
  }

  // -- comparison --------------------------------------------------------------------------------------------------

  let marked = null;
  function mark(id) {
    if (marked && marked !== id) {
      const first = marked;
      marked = null;
      location.hash = link("compare", { a: first, b: id });
    } else {
      marked = id;
      location.hash = link("episodes", {});
      live.textContent = `select the episode to compare with ${AR.visible(id)} (c)`;
    }
  }

  function firstDifference(a, b) {
    const n = Math.min(a.length, b.length);
    for (let i = 0; i < n; i++) if (a[i] !== b[i]) return i;
    return a.length === b.length ? -1 : n;
  }

  async function showCompare(query) {
    const form = h("form", { class: "bar" }, h("input", { name: "a", value: query.a || "", placeholder: "id of an episode", "aria-label": "first episode" }), h("input", { name: "b", value: query.b || "", placeholder: "id of another", "aria-label": "second episode" }), h("button", {}, "compare"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const data = new FormData(form);
      location.hash = link("compare", { a: data.get("a").trim(), b: data.get("b").trim() });
    });
    page = { name: "compare", keys: {} };
    if (!query.a || !query.b) {
      main.replaceChildren(h("h1", {}, "Compare two episodes"), form);
      return;
    }
    const [a, b] = await Promise.all([get("episode", { id: query.a }), get("episode", { id: query.b })]);
    const differences = a.segments.map((s, n) => (b.segments[n] ? firstDifference(s.ids, b.segments[n].ids) : 0));
    const first = differences.findIndex((at) => at >= 0);
    const views = [a, b].map((e) => AR.episode(e, { differences, tab: "tokens" }));
    const result = first < 0 ? "identical tokens" : `first difference: token ${differences[first]}${a.segments.length > 1 ? ` of segment ${first}` : ""}`;
    main.replaceChildren(form, h("p", { id: "difference" }, result), h("div", { class: "two" }, views.map((v, n) => h("div", {}, h("h1", {}, h("a", { href: link("episode", { id: [a, b][n].episode_id }) }, AR.visible([a, b][n].episode_id))), v))));
    page.keys = tabKeys(views);
  }

  // -- routes, updates, keys ---------------------------------------------------------------------------------------

  const PAGES = { "": showRun, episodes: showList, episode: showEpisode, compare: showCompare };

  async function route() {
    const [path, text] = location.hash.replace(/^#\/?/, "").split("?", 2);
    const query = Object.fromEntries(new URLSearchParams(text || ""));
    document.querySelectorAll("nav a").forEach((a) => {
      const on = a.dataset.page === (path || "run") || (a.dataset.page === "episodes" && path === "episode");
      if (on) a.setAttribute("aria-current", "page");
      else a.removeAttribute("aria-current");
    });
    try {
      await (PAGES[path] || showRun)(query);
    } catch (e) {
      main.replaceChildren(problem(e));
      page = { name: "problem" };
    }
    document.title = `${run ? run.name : "agentrl"}${path ? ` · ${query.id || path}` : ""}`;
    main.dataset.ready = location.hash || "#/";
  }

  let unchanged = 0; // polls since the last change
  async function follow() {
    try {
      const now = await get("state");
      const changed = state && JSON.stringify(now) !== JSON.stringify(state);
      state = now;
      unchanged = changed ? 0 : unchanged + 1;
      live.classList.toggle("on", unchanged < 8);
      if (!marked) live.textContent = unchanged < 8 ? `${now.episodes} episodes` : `${now.episodes} episodes, no new data`;
      if (changed && page && page.refresh && !document.hidden) await page.refresh();
    } catch {
      live.classList.remove("on");
      live.textContent = "no response from the server";
    }
    setTimeout(follow, 1500);
  }

  const help = document.getElementById("help");
  help.append(h("h2", {}, "Keys"), h("table", {}, [["/", "search the list"], ["j k", "next, previous episode"], ["Enter", "open"], ["Esc", "back to the list"], ["v t r", "conversation, tokens, trained rows"], ["1 … 6", Object.values(AR.MODES).map((m) => m.label).join(", ")], ["← →", "previous, next token"], ["c", "compare: mark one episode, then another"], ["?", "show this help"]].map(([k, t]) => h("tr", {}, h("td", {}, h("kbd", {}, k)), h("td", {}, t)))), h("form", { method: "dialog" }, h("button", {}, "close")));
  document.getElementById("help-button").addEventListener("click", () => help.showModal());

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (typing) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (event.key === "?") return help.showModal();
    const act = page && page.keys && page.keys[event.key];
    if (act && !(event.target.closest(".tokens") && event.key.startsWith("Arrow")) && !(event.key === "Enter" && event.target.tagName === "BUTTON")) {
      event.preventDefault();
      act();
    }
  });

  window.addEventListener("hashchange", route);
  route().then(follow);
})();
