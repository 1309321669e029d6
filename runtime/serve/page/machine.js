// The machine at work, once a second.

import { headers } from "./stream.js";
import { bytes, count, element, rate, seconds, share } from "./words.js";

const byId = (id) => document.getElementById(id);
const EVERY_MS = 1000;
const KEPT = 120;
const LEAST = 20;
const [WIDE, HIGH] = [300, 72];
const MANY = 64;
const PARTS = {
  weights: ["weights", "residents", "layer_cache", "embedding_head", "embedding", "norms"],
  experts: ["experts"],
  kv: ["kv"],
  kept: ["kv_reuse", "kept"],
  staging: ["staging", "ring", "kv_ring", "kv_staging", "kv_bounce"],
};
const BOUND = { link: "bound by the link", compute: "bound by compute", ssd: "bound by the SSD", cpu: "bound by the CPU", bus: "bound by the DRAM bus" };

const put = (id, text) => {
  const found = byId(id);
  if (found.textContent !== text) found.textContent = text;
};
const width = (id, part, whole) => (byId(id).style.width = `${whole > 0 ? Math.min(100, (100 * part) / whole) : 0}%`);

export class Machine {
  constructor(talk) {
    this.talk = talk;
    this.rates = [];
    this.watch();
  }

  async watch() {
    for (;;) {
      if (!document.hidden) await this.look();
      await new Promise((after) => setTimeout(after, EVERY_MS));
    }
  }

  async look() {
    try {
      const reply = await fetch("machine", { headers: headers(this.talk.key) });
      if (reply.status === 401) return this.state("locked", "wants a key");
      if (!reply.ok) return this.state("gone", `answered ${reply.status}`);
      this.show(await reply.json());
    } catch {
      this.state("gone", "no answer");
    }
  }

  state(name, words = name) {
    byId("state").dataset.state = name;
    put("state", words);
  }

  show({ state, progress, info, vital }) {
    this.state(state);
    if (info?.model) {
      this.talk.model = info.model;
      put("model", info.model);
    }
    byId("loading").hidden = state === "ready" || !progress;
    if (progress) {
      put("phase", progress.phase ?? "");
      width("loaded", progress.done, progress.total);
      put("loaded-words", progress.total ? share(progress.done / progress.total) : "");
    }
    if (vital) this.vital(vital);
  }

  vital(v) {
    put("rate", rate(v.tokens_per_s));
    put("rate-predicted", rate(v.predicted_tokens_per_s));
    this.rates = [...this.rates, [v.tokens_per_s ?? 0, v.predicted_tokens_per_s ?? null]].slice(-KEPT);
    this.curve();
    this.pass(v);
    this.tiers(v);
    put("passes", count(v.passes));
    put("made", count(v.generated_tokens));
    put("restored", count(v.restored_tokens));
    put("preempted", count(v.preempted));
  }

  curve() {
    const most = Math.max(1e-9, ...this.rates.flat().filter((x) => x !== null)) * 1.15;
    const at = (k) => (WIDE * k) / (Math.max(this.rates.length, LEAST) - 1);
    const path = (which) => {
      let drawn = "";
      let pen = "M";
      this.rates.forEach((pair, k) => {
        if (pair[which] === null) pen = "M";
        else {
          drawn += `${pen}${at(k).toFixed(1)} ${(HIGH - (HIGH * pair[which]) / most).toFixed(1)}`;
          pen = "L";
        }
      });
      return drawn;
    };
    const line = path(0);
    byId("curve-line").setAttribute("d", line);
    byId("curve-area").setAttribute("d", `${line}L${at(this.rates.length - 1).toFixed(1)} ${HIGH}L0 ${HIGH}Z`);
    byId("curve-predicted").setAttribute("d", path(1));
  }

  pass(v) {
    const limit = v.rows_limit ?? v.rows ?? 0;
    const shown = Math.min(limit, 256);
    const decoding = Math.min(v.rows ?? 0, v.decode_rows ?? v.rows ?? 0);
    const rows = byId("rows");
    rows.classList.toggle("many", shown > MANY);
    while (rows.children.length > shown) rows.lastChild.remove();
    while (rows.children.length < shown) rows.append(document.createElement("i"));
    [...rows.children].forEach((one, k) => (one.className = k < decoding ? "decode" : k < (v.rows ?? 0) ? "prompt" : ""));
    rows.setAttribute("aria-label", `${v.rows ?? 0} of ${limit} rows, ${decoding} of them decode`);
    put("rows-now", count(v.rows));
    put("rows-limit", count(v.rows_limit));
    put("queue-words", v.waiting ? `${count(v.waiting)} wait${v.waiting === 1 ? "s" : ""}${v.queue_limit ? ` of ${count(v.queue_limit)}` : ""}` : "nothing waits");
    width("pass-decode", v.decode_rows ?? 0, v.pass_tokens_limit);
    width("pass-prompt", v.prompt_tokens ?? 0, v.pass_tokens_limit);
    put("pass-words", v.pass_tokens === undefined ? "no pass yet" : `${count(v.decode_rows)} decoded, ${count(v.prompt_tokens)} of prompts`);
    put("pass-limit", v.pass_tokens_limit ? `of ${count(v.pass_tokens_limit)} tokens` : "");
    put("pass-s", seconds(v.pass_s));
    put("pass-predicted", seconds(v.predicted_pass_s));
    put("idle", share(v.idle_share));
    byId("binds").hidden = !v.binds;
    if (v.binds) put("binds", BOUND[v.binds] ?? `bound by ${v.binds}`);
  }

  tiers(v) {
    const names = new Set();
    const drawn = Object.entries(v.tiers ?? {}).map(([tier, { capacity, ...items }]) => {
      const parts = grouped(items);
      const held = Object.values(parts).reduce((sum, n) => sum + n, 0);
      const whole = capacity || held;
      const made = document.createElement("div");
      const head = element("p", "", "pair tier-head");
      head.append(element("b", tier.toUpperCase()), element("span", capacity ? `${bytes(held)} of ${bytes(capacity)}` : bytes(held), "quiet"));
      const track = element("div", "", "track");
      for (const [name, size] of Object.entries(parts)) {
        if (!size) continue;
        names.add(name);
        const fill = element("div", "", "fill");
        fill.title = `${name} ${bytes(size)}`;
        fill.style.background = colour(name);
        fill.style.width = `${(100 * size) / whole}%`;
        track.append(fill);
      }
      made.append(head, track);
      return made;
    });
    byId("tiers").replaceChildren(...drawn);
    byId("pages-tier").hidden = !v.pages;
    if (v.pages) {
      names.add("kv").add("kept");
      width("pages-used", v.pages_used ?? 0, v.pages);
      width("pages-kept", v.pages_kept ?? 0, v.pages);
      put("pages-words", `${count(v.pages_used)} used, ${count(v.pages_kept)} kept of ${count(v.pages)}`);
    }
    byId("legend").replaceChildren(
      ...[...names].map((name) => {
        const item = document.createElement("li");
        const mark = document.createElement("i");
        mark.style.background = colour(name);
        item.append(mark, NAMES[name] ?? name);
        return item;
      }),
    );
  }
}

const NAMES = { kv: "KV", kept: "kept prefixes", staging: "in transit" };
const colour = (name) => `var(--${name})`;

/** A plan's items as the few parts that are drawn, in their order. */
function grouped(items) {
  const parts = Object.fromEntries([...Object.keys(PARTS), "other"].map((part) => [part, 0]));
  for (const [item, size] of Object.entries(items)) parts[Object.keys(PARTS).find((part) => PARTS[part].includes(item)) ?? "other"] += size;
  return parts;
}
