"use strict";
// One episode: the conversation, coloured tokens, the rows that were trained on. The single-file export embeds this script.
// The text of episodes is untrusted. It only becomes text nodes: these files do not use innerHTML.

const AR = {};

AR.h = function (tag, attrs, ...children) {
  const el = document.createElement(tag);
  for (const [k, v] of Object.entries(attrs || {})) {
    if (v === null || v === undefined || v === false) continue;
    if (k.startsWith("on")) el.addEventListener(k.slice(2), v);
    else if (k === "class") el.className = v;
    else if (v === true) el.setAttribute(k, "");
    else el.setAttribute(k, String(v));
  }
  for (const c of children.flat(3)) {
    if (c !== null && c !== undefined && c !== false) el.append(c instanceof Node ? c : document.createTextNode(String(c)));
  }
  return el;
};

AR.number = function (v, digits = 3) {
  if (v === null || v === undefined || v === "") return "–";
  if (typeof v !== "number") return String(v);
  if (Number.isInteger(v)) return String(v);
  return Math.abs(v) < 0.001 ? v.toExponential(1) : v.toFixed(digits);
};

// Shows control characters as escapes; \n and \t stay, for <pre>.
AR.visible = function (text) {
  return String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g, (c) => {
    const code = c.codePointAt(0);
    return code < 256 ? "\\x" + code.toString(16).padStart(2, "0") : "\\u" + code.toString(16).padStart(4, "0");
  });
};

AR.PROVENANCE = ["PROMPT", "SAMPLED", "OBSERVATION", "TEMPLATE", "FORCED", "DEMONSTRATION", "OTHER_AGENT"];
AR.HUES = ["rgba(125,135,150,.28)", "rgba(46,158,107,.38)", "rgba(74,134,216,.34)", "rgba(170,120,220,.34)", "rgba(220,80,70,.42)", "rgba(215,160,40,.42)", "rgba(40,170,190,.36)"];

const shade = (r, g, b, a) => `rgba(${r},${g},${b},${Math.max(0, Math.min(0.75, a)).toFixed(3)})`;
const signed = (v, scale) => (v === null || v === undefined ? "" : v >= 0 ? shade(46, 158, 107, (0.75 * v) / scale) : shade(220, 70, 60, (-0.75 * v) / scale));
const hue = (n) => `hsla(${(n * 137.5 + 200) % 360}, 65%, 50%, .36)`;

// Each mode: its label, the colour of token i of a segment, and the entries of the legend.
AR.MODES = {
  provenance: {
    label: "provenance",
    color: (s, i) => AR.HUES[s.provenance[i]],
    legend: (e) => AR.PROVENANCE.map((n, p) => [AR.HUES[p], n]).filter((_, p) => e.segments.some((s) => s.provenance.includes(p))),
  },
  mask: {
    label: "mask",
    color: (s, i) => (s.mask[i] ? shade(46, 158, 107, 0.4) : ""),
    legend: () => [[shade(46, 158, 107, 0.4), "1: trained on, if the episode is"], ["transparent", "0"]],
  },
  log_prob: {
    label: "log-prob",
    color: (s, i) => (s.log_prob[i] === null ? "" : shade(215, 120, 20, 0.06 + (0.69 * -s.log_prob[i]) / 5)),
    legend: () => [[0, -0.5, -2, -5].map((v) => [shade(215, 120, 20, 0.06 + (0.69 * -v) / 5), `${v}`])].flat().concat([["transparent", "not sampled"]]),
  },
  difference: {
    label: "engine − trainer",
    color: (s, i, e) => (AR.difference(s, i) === null ? "" : signed(AR.difference(s, i), AR.scale(e))),
    legend: (e) =>
      e.segments.some((s) => s.trainer_log_prob)
        ? [[signed(AR.scale(e), AR.scale(e)), `+${AR.number(AR.scale(e))}`], ["transparent", "equal"], [signed(-AR.scale(e), AR.scale(e)), `−${AR.number(AR.scale(e))}`]]
        : [["transparent", "this episode was not trained on, or the trainer's log-probs were not recorded"]],
  },
  advantage: {
    label: "advantage",
    color: (s, i, e) => (s.mask[i] && AR.advantage(e, s) !== null ? signed(AR.advantage(e, s), 2) : ""),
    legend: (e) => (AR.advantage(e) === null ? [["transparent", "this episode was not trained on"]] : [[signed(1, 2), "+1"], [signed(-1, 2), "−1"], ["transparent", "not trained on"]]),
  },
  version: {
    label: "policy version",
    color: (s, i) => (s.version[i] === null ? "" : hue(s.version[i])),
    legend: (e) => [...new Set(e.segments.flatMap((s) => s.version))].filter((v) => v !== null).sort((a, b) => a - b).map((v) => [hue(v), `version ${v}`]),
  },
};

AR.difference = (s, i) => (s.trainer_log_prob && s.trainer_log_prob[i] !== null && s.log_prob[i] !== null ? s.log_prob[i] - s.trainer_log_prob[i] : null);
AR.scale = function (e) {
  if (e.diffScale === undefined) {
    const all = e.segments.flatMap((s) => s.ids.map((_, i) => Math.abs(AR.difference(s, i) || 0)));
    e.diffScale = Math.max(1e-6, all.reduce((a, b) => Math.max(a, b), 0));
  }
  return e.diffScale;
};
// Of several roles each has its own advantage, which is that of its segments.
AR.advantage = (e, s) => { const v = e.roles && s ? s.advantage : e.advantage; return v === null || v === undefined ? null : v; };

AR.piece = function (s, i) {
  if (!s.text) return `‹${s.ids[i]}›`;
  return s.text[i];
};

AR.aboutToken = function (e, s, i) {
  const parts = [`token ${i}`, `id ${s.ids[i]}`, s.text ? JSON.stringify(AR.visible(s.text[i])) : null, AR.PROVENANCE[s.provenance[i]], s.turn[i] < 0 ? "before the first turn" : `turn ${s.turn[i]}`, `mask ${s.mask[i]}`];
  if (s.log_prob[i] !== null) parts.push(`log p ${s.log_prob[i].toFixed(4)} (p ${Math.exp(s.log_prob[i]).toFixed(3)})`, `version ${s.version[i]}`, `temperature ${AR.number(s.temperature[i], 2)}`);
  if (s.trainer_log_prob && s.trainer_log_prob[i] !== null) parts.push(`trainer ${s.trainer_log_prob[i].toFixed(4)}`, `difference ${AR.number(AR.difference(s, i), 5)}`);
  if (s.mask[i] && AR.advantage(e, s) !== null) parts.push(`advantage ${AR.number(AR.advantage(e, s))}`);
  return parts.filter((p) => p !== null).join("  ·  ");
};

// The tokens of a segment. `difference`: index of the token to mark in a comparison.
AR.tokens = function (e, number, mode, about, difference) {
  const s = e.segments[number];
  const box = AR.h("div", { class: "tokens", tabindex: 0, "data-segment": number, "aria-label": `tokens of segment ${number}` });
  const starts = new Map(s.contexts.map((c, n) => [c, n]));
  const turnAt = new Map([...starts.keys()].map((c) => [c, s.turn[c]]));
  const spans = [];
  let at = -1;
  const show = (i) => {
    if (at >= 0 && spans[at]) spans[at].classList.remove("at");
    at = i;
    spans[i].classList.add("at");
    about.textContent = AR.aboutToken(e, s, i);
  };
  const paint = (from) => {
    const part = document.createDocumentFragment();
    const end = Math.min(from + 3000, s.ids.length);
    for (let i = from; i < end; i++) {
      if (starts.has(i)) part.append(AR.h("span", { class: "mark" }, `turn ${turnAt.get(i)}`));
      const text = AR.piece(s, i);
      const el = document.createElement("span");
      el.dataset.i = i;
      if (text.includes("\n")) {
        for (const [n, line] of text.split("\n").entries()) {
          if (n) el.append(AR.h("span", { class: "sign" }, "↵"), "\n");
          el.append(AR.visible(line));
        }
      } else el.textContent = AR.visible(text) || (text ? text : "");
      if (i === difference) el.className = "split";
      el.style.backgroundColor = AR.MODES[mode].color(s, i, e);
      spans.push(el);
      part.append(el);
    }
    box.append(part);
    if (end < s.ids.length) requestAnimationFrame(() => paint(end));
  };
  paint(0);
  box.addEventListener("mouseover", (event) => {
    const el = event.target.closest("[data-i]");
    if (el) show(Number(el.dataset.i));
  });
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !spans.length) return;
    event.preventDefault();
    show(Math.max(0, Math.min(spans.length - 1, at + step)));
    spans[at].scrollIntoView({ block: "nearest" });
  });
  box.recolor = (next) => spans.forEach((el, i) => (el.style.backgroundColor = AR.MODES[next].color(s, i, e)));
  return box;
};

// The segments of an episode as a forest: each below the one from which it branches.
AR.forest = function (e, boxes) {
  const nodes = e.forest || [];
  if (nodes.length < 2) return null;
  const below = (n) => nodes.flatMap((node, i) => (node.parent_segment === n ? [i] : []));
  const item = (n) => {
    const node = nodes[n];
    const why = [node.parent_turn === null ? null : `continues turn ${node.parent_turn}`, node.reason].filter(Boolean).join("; ");
    const children = below(n);
    return AR.h("li", { "data-agent": AR.visible(node.agent) },
      AR.h("button", { type: "button", onclick: () => boxes[n].scrollIntoView({ block: "center" }) }, `segment ${n}`),
      ` ${AR.visible(node.agent)}, ${node.turns.length === 1 ? "turn" : "turns"} ${node.turns.join(", ") || "–"} `,
      why ? AR.h("span", { class: "soft" }, AR.visible(why)) : null, children.length ? AR.h("ul", {}, children.map(item)) : null);
  };
  return AR.h("nav", { class: "forest", "aria-label": "conversations of this episode" }, AR.h("ul", {}, below(null).map(item)));
};

AR.tokenView = function (e, options = {}) {
  let mode = AR.mode || "provenance";
  const about = AR.h("div", { class: "about", role: "status" }, "hover over a token, or use ← and →");
  const legend = AR.h("div", { class: "legend", "aria-label": "legend" });
  const boxes = e.segments.map((_, n) => AR.tokens(e, n, mode, about, (options.differences || [])[n]));
  const buttons = Object.entries(AR.MODES).map(([name, m], n) =>
    AR.h("button", { type: "button", "data-mode": name, title: `key ${n + 1}`, onclick: () => choose(name) }, m.label));
  const choose = (name) => {
    mode = AR.mode = name;
    buttons.forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.mode === name)));
    legend.replaceChildren(...AR.MODES[name].legend(e).map(([color, text]) => {
      const swatch = AR.h("i");
      swatch.style.backgroundColor = color;
      return AR.h("span", {}, swatch, text);
    }));
    boxes.forEach((b) => b.recolor(name));
  };
  const view = AR.h("section", { class: "token-view" }, AR.h("div", { class: "bar", role: "group", "aria-label": "colour tokens by" }, AR.h("span", { class: "soft" }, "colour by"), buttons), legend, AR.forest(e, boxes),
    boxes.map((b, n) => [e.segments.length > 1 ? AR.h("h2", {}, `segment ${n}`, e.segments[n].origin ? AR.h("span", { class: "soft" }, ` ${AR.visible(e.segments[n].origin)}`) : null) : null, b]), about);
  view.choose = (n) => buttons[n] && buttons[n].click();
  choose(mode);
  return view;
};

AR.seconds = (v) => (v === undefined || v === null ? null : v < 1 ? `${(v * 1000).toFixed(v < 0.01 ? 1 : 0)} ms` : `${v.toFixed(1)} s`);
AR.json = (v) => AR.h("pre", {}, AR.visible(typeof v === "string" ? v : JSON.stringify(v, null, 1)));

// The episode holds its images as data URLs. A missing image is shown as text.
AR.image = function (e, ref) {
  const name = ref && typeof ref.sha256 === "string" ? ref.sha256 : "";
  const url = Object.hasOwn(e.images || {}, name) ? e.images[name] : null;
  return url ? AR.h("img", { src: url, alt: `image ${name.slice(0, 12)}`, class: "shown" }) : AR.h("span", { class: "soft" }, `(image ${AR.visible(name.slice(0, 12) || "?")}…, not in this record)`);
};
AR.content = function (e, message) {
  if (typeof message.content === "string") return AR.h("pre", {}, AR.visible(message.content));
  if (Array.isArray(message.content)) return message.content.map((p) => (p && typeof p.text === "string" ? AR.h("pre", {}, AR.visible(p.text)) : p && p.type === "image" ? AR.image(e, p.image) : AR.json(p)));
  return AR.json(message.content === undefined ? message : message.content);
};

AR.part = (kind, who, ...body) => AR.h("div", { class: `part ${kind}` }, AR.h("div", { class: "who" }, who), body);

// A role, and whether the policy or another player has it.
AR.speaker = (e, role) => `${AR.visible(role)}${e.roles ? (e.roles.includes(role) ? ", played by the policy" : ", played by another") : ""}`;

AR.conversation = function (e) {
  const first = e.segments[0];
  const prompt = first && first.text ? first.text.filter((_, i) => first.provenance[i] === 0).join("") : typeof e.task.prompt === "string" ? e.task.prompt : JSON.stringify(e.task.prompt, null, 1);
  const turns = e.turns.map((t) => {
    const a = t.action;
    const head = [AR.h("b", {}, t.summary ? `turn ${t.index}: a summary of the context` : `turn ${t.index}`), `${a.finish_reason}${t.matched_stop === null ? "" : ` at ${AR.visible(JSON.stringify(t.matched_stop))}`}`, t.timings.generate_s !== undefined ? `generated in ${AR.seconds(t.timings.generate_s)}` : null, t.timings.cached_tokens ? `${t.timings.cached_tokens} cached tokens` : null, t.reward ? `step reward ${AR.number(t.reward)}` : null, t.rewards ? `rewards ${AR.visible(Object.entries(t.rewards).map(([k, v]) => `${k} ${AR.number(v)}`).join(", "))}` : null, t.state_key !== null ? `state ${AR.visible(t.state_key)}` : null, e.segments.length > 1 && t.segment >= 0 ? `segment ${t.segment}` : null];
    return AR.h("article", { class: "turn" }, AR.h("header", {}, head.filter(Boolean).map((x) => (x instanceof Node ? x : AR.h("span", {}, x)))),
      t.summary ? AR.part("env", "the context policy, as user", AR.h("pre", {}, AR.visible(t.summary.instruction))) : null,
      AR.part("policy", t.agent_id === "policy" ? "policy" : AR.speaker(e, t.agent_id), AR.h("pre", {}, AR.visible(a.text) || "(empty)")),
      a.calls.map((c, n) => {
        const r = a.results[n];
        const cut = r && r.full_bytes ? `, truncated: ${r.full_bytes} bytes in full, sha256 ${String(r.sha256).slice(0, 12)}…` : "";
        return AR.part(r && r.is_error ? "tool wrong" : "tool", `tool ${AR.visible(c.name)}${r ? `, ${AR.seconds(r.duration_s)}` : ", no result"}${cut}`, AR.json(c.arguments), r ? AR.content(e, { content: r.parts || r.content }) : null, r && r.sha256 && Object.hasOwn(e.outputs || {}, r.sha256) ? AR.h("details", { class: "whole" }, AR.h("summary", { class: "who" }, "complete output"), AR.h("pre", {}, AR.visible(e.outputs[r.sha256]))) : null);
      }),
      a.errors.map((x) => AR.part("wrong", `parse error (${AR.visible(x.kind)})`, AR.h("pre", {}, AR.visible(x.message)))),
      a.answer !== null ? AR.part("policy", "answer", AR.h("pre", {}, AR.visible(a.answer))) : null,
      t.observation.messages.map((m) => {
        const who = `environment, as ${AR.visible(m.role)}${t.observation.to ? `, to ${AR.visible(t.observation.to)}` : ""}${t.timings.env_s !== undefined ? `, ${AR.seconds(t.timings.env_s)}` : ""}${t.observation_cut_tokens ? `, ${t.observation_cut_tokens} tokens truncated` : ""}`;
        const again = a.results.some((r) => r.content === m.content || (r.parts && JSON.stringify(r.parts) === JSON.stringify(m.content)));
        return again ? AR.h("details", { class: "part env" }, AR.h("summary", { class: "who" }, `${who}: same as the result above`), AR.content(e, m)) : AR.part("env", who, AR.content(e, m));
      }),
      t.context ? AR.h("details", { class: "part env" }, AR.h("summary", { class: "who" }, `the context policy continued with ${t.context.length} messages`), t.context.map((m) => [AR.h("div", { class: "who" }, AR.visible(m.role)), AR.content(e, m)])) : null,
      Object.keys(t.info).length ? AR.h("details", { class: "part" }, AR.h("summary", {}, "info"), AR.json(t.info)) : null);
  });
  return AR.h("section", {}, AR.h("article", { class: "turn" }, AR.h("header", {}, AR.h("b", {}, "prompt")), AR.part("env", "as rendered for the model", AR.h("pre", {}, AR.visible(prompt)), ((first && first.images) || []).filter((p) => first.provenance[p.at] === 0).map((p) => AR.image(e, p)))), turns,
    AR.h("details", {}, AR.h("summary", {}, "task, state, timings"), AR.json({ task: e.task, state: e.state, timings: e.timings, seed: e.seed, ...e.extra })));
};

AR.trained = function (e) {
  if (!e.training_step) return AR.h("section", {}, AR.h("p", { class: "soft" }, "This episode has not been trained on."));
  const f = e.training_step;
  const head = AR.h("div", { class: "facts" }, [["optimizer step", f.optimizer_step], ["rollout", f.step], ["learning rate", AR.number(f.lr, 6)], ["rows in the batch", f.rows], ["loss", f.metrics && AR.number(f.metrics.loss, 5)], ["gradient norm", f.metrics && AR.number(f.metrics.grad_norm)]].map(([k, v]) => AR.h("span", {}, `${k} `, AR.h("b", {}, AR.number(v)))));
  const rows = e.rows.map((r) => {
    const s = e.segments[r.segment_index];
    const most = Math.max(...r.members.map((m) => m.tokens), 1);
    const lanes = AR.h("div", { class: "lanes" }, r.members.map((m) => {
      const fill = AR.h("i");
      fill.style.width = `${(100 * m.tokens) / most}%`;
      return AR.h("div", { class: `lane ${m.episode_id === e.episode_id && m.segment_index === r.segment_index ? "me" : ""}` }, AR.h("span", { class: "name" }, AR.visible(m.episode_id) + (m.segment_index ? ` segment ${m.segment_index}` : "")), AR.h("span", { class: "full" }, fill), AR.h("span", { class: "n" }, m.tokens));
    }));
    const place = r.rank === null ? "" : `, data-parallel rank ${r.rank}, micro-batch ${r.micro_batch} of ${r.members.length} rows ${f.tree_packing == null ? "padded to" : "packed into"} ${r.width} positions${f.multiple > 1 ? `, a multiple of ${f.multiple}` : ""}`;
    return [AR.h("h2", {}, `row ${r.number} of ${r.of}: segment ${r.segment_index}${place}`), AR.h("p", { class: "soft" }, `${r.tokens} tokens, ${r.trained} trained; advantage ${AR.number(r.advantage)}; weight of each trained token ${r.weight.toExponential(3)} (including the global denominator)`), lanes, AR.rowTable(s, r)];
  });
  return AR.h("section", { class: "trained-view" }, head, rows);
};

// The positions of a row, AR.MAX_POSITIONS of them at a time.
AR.MAX_POSITIONS = 4000;
AR.rowTable = function (s, r) {
  const columns = ["position", "input id", "token", "label id", "label", "mask", "weight", "advantage", "engine log p", "trainer log p", "temperature"];
  const last = s.ids.length - 1;
  const body = AR.h("tbody");
  const shown = AR.h("span", {});
  const more = AR.h("button", { type: "button", onclick: () => draw() });
  const rest = AR.h("p", { class: "soft rest" }, shown, " ", more);
  let at = 0;
  const draw = () => {
    for (const end = Math.min(last, at + AR.MAX_POSITIONS); at < end; at++) body.append(AR.h("tr", { class: s.mask[at + 1] ? "trained" : "" }, cells(at).map((c) => AR.h("td", {}, c))));
    shown.textContent = `first ${at} of ${last} positions shown`;
    more.textContent = `show ${Math.min(AR.MAX_POSITIONS, last - at)} more`;
    rest.hidden = at === last;
    if (at < last) return;
    for (let p = 0; p < Math.min(r.padding, 3); p++) body.append(AR.h("tr", { class: "soft" }, AR.h("td", {}, last + p), AR.h("td", {}, 0), AR.h("td", { colspan: 9 }, "padding")));
    if (r.padding > 3) body.append(AR.h("tr", { class: "soft" }, AR.h("td", { colspan: 11 }, `… ${r.padding} padding positions in total`)));
  };
  const cells = (p) => {
    const t = p + 1;
    return [p, s.ids[p], s.text ? AR.visible(s.text[p]) : "", s.ids[t], s.text ? AR.visible(s.text[t]) : "", s.mask[t], s.mask[t] ? r.weight.toExponential(2) : 0, s.mask[t] ? AR.number(r.advantage) : 0, s.log_prob[t] === null ? "" : s.log_prob[t].toFixed(4), s.trainer_log_prob && s.trainer_log_prob[t] !== null ? s.trainer_log_prob[t].toFixed(4) : "", s.mask[t] ? AR.number(s.temperature[t], 2) : 1];
  };
  draw();
  return AR.h("div", { class: "wide card" }, AR.h("table", { class: "row-table" }, AR.h("thead", {}, AR.h("tr", {}, columns.map((c) => AR.h("th", {}, c)))), body), rest);
};

AR.facts = function (e) {
  const rewards = Object.entries(e.rewards).map(([k, v]) => [AR.visible(k), v === null ? "abstained" : `${AR.number(v)}${e.weights[k] === 1 || e.weights[k] === undefined ? "" : ` × ${e.weights[k]}`}`]);
  const sampled = e.segments.reduce((n, s) => n + s.mask.reduce((a, b) => a + b, 0), 0);
  const tokens = e.segments.reduce((n, s) => n + s.ids.length, 0);
  const replay = e.replay === null ? "identical" : e.replay === undefined || e.replay === "unknown" ? null : `${e.replay.cause}: ${e.replay.what}`;
  const all = [["ended by", e.stop_reason + (e.cause ? ` (${e.cause})` : "")], ["score", e.score], ...rewards, ["turns", e.turns.length], ["tokens", `${sampled} sampled of ${tokens}`], ["advantage", e.roles ? e.rows.map((r) => `${AR.visible(r.role)} ${AR.number(r.advantage)}`).join(", ") : AR.advantage(e)], ["step", e.step], ["split", e.split], ["group", e.group_index], ["branch of", e.parent ? `${e.parent} at turn ${e.branch_turn}` : null], ["time", e.timings.episode_s === undefined ? null : AR.seconds(e.timings.episode_s)], ["replay", replay], ["settings", e.config]];
  return AR.h("div", { class: "facts" }, all.filter(([, v]) => v !== null && v !== undefined && v !== "").map(([k, v]) => AR.h("span", {}, `${k} `, AR.h("b", {}, AR.visible(AR.number(v))))));
};

AR.replayBox = function (e) {
  const d = e.replay;
  if (!d || d === "unknown") return null;
  return AR.h("div", { class: "error" }, AR.h("b", {}, `The last replay differs (${d.cause}): ${d.what}`), ` (${d.turn < 0 ? "the first prompt" : `turn ${d.turn}`}, token ${d.token} of segment ${d.segment})`, AR.h("pre", {}, `recorded  ${AR.visible(d.then)}\nreplayed  ${AR.visible(d.today)}`));
};

// The episode with its tabs. Returns an element with the methods `tab(name)` and `color(n)`.
AR.episode = function (e, options = {}) {
  const built = {};
  const builders = { conversation: () => AR.conversation(e), tokens: () => AR.tokenView(e, options), trained: () => AR.trained(e) };
  const body = AR.h("div");
  const names = { conversation: "Conversation", tokens: "Tokens", trained: "Trained rows" };
  const buttons = Object.entries(names).map(([n, label]) => AR.h("button", { type: "button", role: "tab", "data-tab": n, onclick: () => tab(n) }, label));
  const view = AR.h("div", { class: "episode" }, AR.facts(e), AR.replayBox(e), e.note ? AR.h("p", { class: "soft" }, AR.visible(e.note)) : null, AR.h("div", { class: "tabs", role: "tablist" }, buttons), body);
  const tab = (name) => {
    AR.tab = name;
    built[name] = built[name] || builders[name]();
    buttons.forEach((b) => b.setAttribute("aria-selected", String(b.dataset.tab === name)));
    body.replaceChildren(built[name]);
  };
  view.tab = tab;
  view.color = (n) => {
    if (AR.tab !== "tokens") tab("tokens");
    built.tokens.choose(n);
  };
  tab(options.tab || AR.tab || "conversation");
  return view;
};

// The single-file export: the page holds its episode.
AR.single = function () {
  const data = document.getElementById("episode-data");
  if (!data) return false;
  const e = JSON.parse(data.textContent);
  const main = document.getElementById("main");
  const view = AR.episode(e);
  main.replaceChildren(AR.h("h1", {}, `episode ${AR.visible(e.episode_id)}`), view);
  document.addEventListener("keydown", (event) => {
    if (event.key >= "1" && event.key <= "6" && !event.ctrlKey && !event.metaKey && !event.altKey) view.color(Number(event.key) - 1);
  });
  return true;
};
