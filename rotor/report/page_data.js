// What is shown, and what all parts of the page share. The files are one script in the page.
const data = JSON.parse(document.getElementById("data").textContent);
const NAME = 0, MODULE = 1, PHASE = 2, COST = 3, WORKSPACE = 4, INPUTS = 5, OUTPUTS = 6;
const FLAGS = 7, RUNS = 8, KIND = 9, PLACE = 10, SOURCE = 11;
// The parts of a chain are stages, and its runs have labels.
const PART = data.labels ? "stage" : "operation";
const SIZE = 0, STAYS = 1, MAKER = 2, FATE = 3;
const PHASES = ["forward", "loss", "backward"];
// Transfers of a second tier: written or fetched, storage, begin, end; and the waits before the runs.
const DIRECTION = 0, MOVED = 1, BEGIN = 2, END = 3;
const moves = data.moved || [], waits = data.waits || [];
const FATES = moves.length ? ["kept", "offloaded", "dropped", "recomputed"] : ["kept", "dropped", "recomputed"];
const WORDS = { offloaded: "offloaded: written to the second tier, fetched back", waited: "waits for the tier" };

function digits(number) { return number >= 100 ? number.toFixed(0) : String(Number(number.toPrecision(3))); }
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let k = 0;
  while (Math.abs(n) >= 1024 && k < units.length - 1) { n /= 1024; k += 1; }
  return (n < 0 ? "-" : "") + digits(Math.abs(n)) + " " + units[k];
}
function time(ns) {
  if (ns >= 1e9) return digits(ns / 1e9) + " s";
  if (ns >= 1e6) return digits(ns / 1e6) + " ms";
  if (ns >= 1e3) return digits(ns / 1e3) + " us";
  return ns ? digits(ns) + " ns" : "0";
}
function total(list, size) { return list.reduce((sum, item) => sum + size(item), 0); }
function made(tag, attributes, parent, text) {
  const element = document.createElement(tag);
  for (const key of Object.keys(attributes || {})) element.setAttribute(key, attributes[key]);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.appendChild(element);
  return element;
}

// -- what groups of operations amount to

function kindOf(ops) {
  const kinds = new Set(ops.map((op) => data.ops[op][KIND]));
  return ["recomputed", "offloaded", "kept", "dropped", "loss", "forward", "backward"].find((k) => kinds.has(k));
}
function figures(ops) {
  const sum = { once: 0, extra: 0, makes: 0, runs: 0, again: 0, workspace: 0, kept: 0, offloaded: 0, dropped: 0, recomputed: 0 };
  for (const k of ops) {
    const op = data.ops[k];
    sum.once += op[COST];
    sum.extra += (op[RUNS] - 1) * op[COST];
    sum.runs = Math.max(sum.runs, op[RUNS]);
    sum.again += op[RUNS] > 1 ? 1 : 0;
    sum.workspace = Math.max(sum.workspace, op[WORKSPACE]);
    for (const s of op[OUTPUTS]) {
      const storage = data.storages[s];
      sum.makes += storage[SIZE];
      if (sum[storage[FATE]] !== undefined) sum[storage[FATE]] += storage[SIZE];
    }
  }
  return sum;
}
function described(title, module, ops) {
  const sum = figures(ops);
  const lines = [title, (PART === "stage" ? "stage: " : "module: ") + (module || "(the model)"),
    "phase: " + PHASES[data.ops[ops[0]][PHASE]],
    "time: " + time(sum.once) + (sum.extra ? " + " + time(sum.extra) + " again" : ""),
    "makes: " + bytes(sum.makes), "workspace: " + bytes(sum.workspace),
    "runs: " + (ops.length > 1 ? "up to " : "") + sum.runs];
  if (ops.length > 1) lines.push("operations: " + ops.length);
  for (const fate of FATES) if (sum[fate]) lines.push(fate + ": " + bytes(sum[fate]));
  if (ops.length === 1) {
    if (data.ops[ops[0]][SOURCE]) lines.push("code: " + data.ops[ops[0]][SOURCE]);
    const flags = data.ops[ops[0]][FLAGS];
    if (flags & 1) lines.push("random: replays its numbers");
    if (flags & 2) lines.push("runs exactly once");
  }
  return lines.join("\n");
}

// -- colours, which follow the style sheet, and canvases, which follow their size

let colors = {};
function readColors() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ink", "soft", "line", "paper", "group", "live", "live-line", "plain", "plain-line", "limit", "measured", "in", "out"];
  colors = {};
  for (const name of names) colors[name] = style.getPropertyValue("--" + name).trim();
  for (const name of [...FATES, ...PHASES]) {
    colors[name] = [style.getPropertyValue("--" + name).trim(), style.getPropertyValue("--" + name + "-line").trim()];
  }
}
const redraws = [];
// A canvas in a holder; draw(context, width, height) is called once a frame at most.
function canvas(holder, label, draw) {
  const element = made("canvas", { role: "img", "aria-label": label }, holder);
  let isWaiting = false;
  const now = () => {
    isWaiting = false;
    const width = holder.clientWidth, height = holder.clientHeight, scale = window.devicePixelRatio || 1;
    if (element.width !== Math.round(width * scale) || element.height !== Math.round(height * scale)) {
      element.width = Math.round(width * scale);
      element.height = Math.round(height * scale);
    }
    const context = element.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = '11px system-ui, "Segoe UI", Helvetica, Arial, sans-serif';
    draw(context, width, height);
  };
  const later = () => { if (!isWaiting) { isWaiting = true; requestAnimationFrame(now); } };
  redraws.push(later);
  new ResizeObserver(later).observe(holder);
  return { element, later };
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readColors();
  for (const later of redraws) later();
});
readColors();

// -- the box beside the pointer

const tip = made("div", { id: "tip" }, document.body);
function showTip(event, text) {
  tip.textContent = text;
  tip.style.display = "block";
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const top = event.clientY + 16 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 16;
  tip.style.left = Math.max(left, 4) + "px";
  tip.style.top = Math.max(top, 4) + "px";
}
function hideTip() { tip.style.display = "none"; }
function legend(place, entries) {
  for (const [name, text] of entries) {
    const key = made("span", { class: "key" }, place);
    made("i", { class: name }, key);
    key.append(text);
  }
}
