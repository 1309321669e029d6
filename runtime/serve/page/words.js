// Figures and replies as a person reads them.

/** 1234567 -> "1,234,567"; what is not known -> "–". */
export const count = (n) => (Number.isFinite(n) ? Math.round(n).toLocaleString("en") : "–");

export function seconds(s) {
  if (!Number.isFinite(s)) return "–";
  if (s < 0.001) return `${(s * 1e6).toFixed(0)} µs`;
  return s < 1 ? `${(s * 1e3).toPrecision(3)} ms` : `${s.toPrecision(3)} s`;
}

export function rate(n) {
  if (!Number.isFinite(n)) return "–";
  return n >= 1000 ? count(n) : n >= 100 ? n.toFixed(0) : n.toPrecision(3).replace(/\.?0+$/, "") || "0";
}

/** 1e9 is a GB. */
export function bytes(n) {
  if (!Number.isFinite(n)) return "–";
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (n >= size) return `${(n / size).toPrecision(3)} ${unit}`;
  return `${n} B`;
}

export const share = (x) => (Number.isFinite(x) ? `${(x * 100).toFixed(x < 0.1 ? 1 : 0)} %` : "–");

function inline(line, into) {
  for (const part of line.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/)) {
    if (/^`[^`]+`$/.test(part)) into.append(element("code", part.slice(1, -1)));
    else if (/^\*\*[^*]+\*\*$/.test(part)) into.append(element("b", part.slice(2, -2)));
    else into.append(part);
  }
}

export function element(name, text = "", kind = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

/** A whole reply: code in fences, `code` and **bold**; all else stands as it came. Never as HTML. */
export function render(text, into) {
  into.replaceChildren();
  text.split(/^```[^\n]*\n?/m).forEach((part, k) => {
    if (k % 2) {
      const block = element("pre");
      block.append(element("code", part.replace(/\n$/, "")));
      into.append(block);
    } else if (part.trim()) inline(k ? part.trim() : part.trimEnd(), into);
  });
}
