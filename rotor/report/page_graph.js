// The operations: two columns that face each other, grouped by module, on one canvas.
const ROW = 20, WIDTH = 300, HEAD = 20, PAD = 6, GAP = 4, COLUMN = 520, MOST_ROWS = 160, LOT = 50;

// -- groups: consecutive operations of one module, nested by its path, in each column

function newGroup(name, path, parent) {
  return { name, path, parent, items: [], open: true, ops: [], depth: parent ? parent.depth + 1 : 0 };
}
function grouped(numbers) {
  const root = newGroup("", "", null);
  let here = root;
  for (const op of numbers) {
    const path = data.ops[op][PLACE];
    if (path) {
      while (here !== root && path !== here.path && !path.startsWith(here.path + ".")) here = here.parent;
      const below = here === root ? path : path.slice(here.path.length + 1);
      for (const name of below ? below.split(".") : []) {
        const group = newGroup(name, here.path ? here.path + "." + name : name, here);
        here.items.push(group);
        here = group;
      }
    } else {
      here = root;
    }
    here.items.push(op);
    for (let group = here; group; group = group.parent) group.ops.push(op);
  }
  return root;
}
// Many operations in a row, without modules to group them, are folded in lots.
function inLots(group) {
  const items = [];
  let row = [];
  const flush = () => {
    if (row.length <= 2 * LOT) { items.push(...row); row = []; return; }
    for (let k = 0; k < row.length; k += LOT) {
      const lot = row.slice(k, k + LOT);
      const name = data.ops[lot[0]][NAME] + " … " + data.ops[lot[lot.length - 1]][NAME];
      const inner = newGroup(name, group.path, group);
      inner.items = lot;
      inner.ops = lot;
      items.push(inner);
    }
    row = [];
  };
  for (const item of group.items) {
    if (typeof item === "number") { row.push(item); } else { flush(); inLots(item); items.push(item); }
  }
  flush();
  group.items = items;
  return group;
}
const columns = [0, 1].map((column) => {
  const numbers = [];
  data.ops.forEach((op, k) => { if ((op[PHASE] === 2 ? 1 : 0) === column) numbers.push(k); });
  return inLots(grouped(numbers));
});
function walk(group, visit) {
  for (const item of group.items) {
    if (typeof item !== "number") { visit(item); walk(item, visit); }
  }
}
function rowsTo(group, depth) {
  let count = 0;
  for (const item of group.items) {
    count += typeof item === "number" || item.depth > depth ? 1 : 1 + rowsTo(item, depth);
  }
  return count;
}
function openTo(depth) {
  for (const root of columns) walk(root, (group) => { group.open = group.depth <= depth; });
}
function openSome() {
  let depth = 0;
  while (depth < 12 && rowsTo(columns[0], depth + 1) + rowsTo(columns[1], depth + 1) <= MOST_ROWS) depth += 1;
  openTo(depth);
}

// -- layout, in the scene's own units

const holder = document.getElementById("graph");
let shown = [], place = new Map(), scene = { width: 0, height: 0 }, curves = [];
let chosen = null, allEdges = false, searched = "", view = { x: 0, y: 0, scale: 1 };

function layout(group, x, y, width, list, backwards) {
  const items = backwards ? group.items.slice().reverse() : group.items;
  for (const item of items) {
    if (typeof item === "number") {
      list.push({ x, y, width, height: ROW, ops: [item], op: item });
      y += ROW + GAP;
    } else if (!item.open) {
      list.push({ x, y, width, height: ROW, ops: item.ops, group: item });
      y += ROW + GAP;
    } else {
      const frame = { x, y, width, height: 0, ops: item.ops, group: item, frame: true };
      list.push(frame);
      y = layout(item, x + PAD, y + HEAD, width - 2 * PAD, list, backwards) + PAD - GAP;
      frame.height = y - frame.y;
      y += GAP;
    }
  }
  return y;
}
function depthOf(group) {
  let most = 0;
  walk(group, (inner) => { if (inner.open) most = Math.max(most, inner.depth); });
  return most;
}
function arrange() {
  shown = [];
  place = new Map();
  const lists = columns.map(() => []);
  const widths = columns.map((root) => WIDTH + 2 * PAD * depthOf(root));
  const ends = columns.map((root, k) => layout(root, k * COLUMN, 24, widths[k], lists[k], k === 1));
  const low = Math.max(ends[0], ends[1]);
  // The backward begins where the forward ends: at the bottom.
  for (const row of lists[1]) row.y += low - ends[1];
  scene = { width: lists[1].length ? COLUMN + widths[1] : widths[0], height: low };
  scene.first = widths[0];
  scene.titles = lists.map((list) => list.length > 0);
  shown = lists[0].concat(lists[1]);
  for (const row of shown) {
    if (!row.frame) for (const op of row.ops) place.set(op, row);
    row.sum = row.ops.length > 1 ? (row.group.sum = row.group.sum || figures(row.ops)) : figures(row.ops);
    row.kind = row.frame ? "group" : row.ops.length > 1 ? (row.group.kind = row.group.kind || kindOf(row.ops)) : kindOf(row.ops);
  }
  connect();
  mark();
}
function curve(from, to, kind) {
  const y1 = from.y + from.height / 2, y2 = to.y + to.height / 2;
  if (Math.abs(from.x - to.x) < COLUMN / 2) {
    const left = from.x >= COLUMN / 2;
    const x1 = left ? from.x : from.x + from.width, x2 = left ? to.x : to.x + to.width;
    const bow = (left ? -1 : 1) * Math.min(90, 18 + Math.abs(y2 - y1) / 6);
    return [x1, y1, x1 + bow, y1, x2 + bow, y2, x2, y2, kind];
  }
  const right = from.x < to.x;
  const x1 = right ? from.x + from.width : from.x, x2 = right ? to.x : to.x + to.width;
  return [x1, y1, (x1 + x2) / 2, y1, (x1 + x2) / 2, y2, x2, y2, kind];
}
function connect() {
  const known = new Set();
  curves = [];
  if (!allEdges && chosen === null) return;
  const add = (maker, reader, kind) => {
    const from = place.get(maker), to = place.get(reader);
    if (!from || !to || from === to) return;
    const key = kind + from.x + "," + from.y + ">" + to.x + "," + to.y;
    if (!known.has(key)) { known.add(key); curves.push(curve(from, to, kind)); }
  };
  data.ops.forEach((op, k) => {
    for (const s of op[INPUTS]) {
      const maker = data.storages[s][MAKER];
      if (allEdges) add(maker, k, "");
      if (chosen === k) add(maker, k, "in");
      if (chosen === maker) add(maker, k, "out");
    }
  });
  curves.sort((one, other) => (one[8] ? 1 : 0) - (other[8] ? 1 : 0));
}
function mark() {
  for (const row of shown) {
    row.faint = Boolean(searched) && !row.ops.some((op) =>
      (data.ops[op][NAME] + " " + data.ops[op][MODULE]).toLowerCase().includes(searched));
  }
  graph.later();
}

// -- drawing what is in view

function fit(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let most = Math.max(1, Math.floor(text.length * width / context.measureText(text).width));
  while (most > 1 && context.measureText(text.slice(0, most) + "…").width > width) most -= 1;
  return text.slice(0, most) + "…";
}
function drawGraph(context, width, height) {
  context.translate(view.x, view.y);
  context.scale(view.scale, view.scale);
  const top = -view.y / view.scale, low = top + height / view.scale;
  context.fillStyle = colors.ink;
  ["forward and loss, downwards", "backward, upwards"].forEach((title, k) => {
    if (scene.titles[k]) context.fillText(title, k * COLUMN, 12);
  });
  const visible = shown.filter((row) => row.y < low && row.y + row.height > top);
  for (const row of visible) if (row.frame) drawRow(context, row);
  for (const one of curves) {
    if (Math.max(one[1], one[7]) < top || Math.min(one[1], one[7]) > low) continue;
    context.strokeStyle = one[8] ? colors[one[8]] : colors.soft;
    context.globalAlpha = one[8] ? 0.9 : 0.45;
    context.lineWidth = one[8] ? 1.6 : 1;
    context.beginPath();
    context.moveTo(one[0], one[1]);
    context.bezierCurveTo(one[2], one[3], one[4], one[5], one[6], one[7]);
    context.stroke();
  }
  context.globalAlpha = 1;
  for (const row of visible) if (!row.frame) drawRow(context, row);
}
function drawRow(context, row) {
  const [fill, edge] = row.frame ? [colors.group, colors.line] : colors[row.kind];
  context.globalAlpha = row.faint ? 0.25 : 1;
  context.fillStyle = fill;
  context.strokeStyle = edge;
  context.lineWidth = row.op !== undefined && row.op === chosen ? 2.5 : 1;
  context.beginPath();
  context.roundRect(row.x, row.y, row.width, row.height, 4);
  context.fill();
  context.stroke();
  if (row.ops.length > 1 && !row.frame) shares(context, row);
  if (view.scale > 0.3) {
    let right = time(row.sum.once + row.sum.extra) + " · " + bytes(row.sum.makes);
    if (row.sum.runs > 1 && row.op !== undefined) right = "×" + row.sum.runs + " · " + right;
    const sign = row.group ? (row.frame ? "▾ " : "▸ ") : "";
    const label = row.group ? row.group.name + " (" + row.ops.length + ")" : data.ops[row.op][NAME];
    context.fillStyle = colors.ink;
    context.textAlign = "right";
    context.globalAlpha *= 0.75;
    context.fillText(right, row.x + row.width - 6, row.y + 14);
    context.globalAlpha = row.faint ? 0.25 : 1;
    context.textAlign = "left";
    const space = row.width - context.measureText(right).width - 24;
    context.fillText(fit(context, sign + label, space), row.x + 6, row.y + 14);
  }
  context.globalAlpha = 1;
}
// What is kept, dropped and recomputed of a folded group's bytes.
function shares(context, row) {
  const all = total(FATES, (fate) => row.sum[fate]);
  let x = row.x + 1;
  for (const fate of FATES) {
    const width = all ? (row.width - 2) * row.sum[fate] / all : 0;
    context.fillStyle = colors[fate][1];
    context.fillRect(x, row.y + row.height - 4, width, 3);
    x += width;
  }
}
const graph = canvas(holder, "the operations and the modules they belong to; the table below has them as text", drawGraph);

// -- choosing an operation

function choose(op, jump) {
  chosen = op;
  if (jump) {
    for (const root of columns) walk(root, (group) => { if (group.ops.includes(op)) group.open = true; });
    arrange();
    const row = place.get(op);
    if (view.scale < 0.6) view.scale = 1;
    view.x = holder.clientWidth / 2 - (row.x + row.width / 2) * view.scale;
    view.y = holder.clientHeight / 2 - row.y * view.scale;
  } else {
    connect();
  }
  graph.later();
  const it = data.ops[op];
  const part = (s, far) => "  storage " + s + ": " + bytes(data.storages[s][SIZE]) +
    (data.storages[s][FATE] ? ", " + data.storages[s][FATE] : "") + (data.storages[s][STAYS] ? ", stays" : "") + far;
  // Forward and backward of a stage have its name.
  const named = (o) => (PART === "stage" && o[PHASE] === 2 ? "backward of " : "") + o[NAME];
  const readers = (s) => data.ops.filter((other) => other[INPUTS].includes(s)).map(named);
  let text = described(it[NAME], it[MODULE], [op]);
  if (it[INPUTS].length) {
    text += "\nreads:\n" + it[INPUTS].map((s) => part(s, ", made by " + named(data.ops[data.storages[s][MAKER]]))).join("\n");
  }
  if (it[OUTPUTS].length) {
    text += "\nmakes:\n" + it[OUTPUTS].map((s) => part(s, ", read by " + (readers(s).join(", ") || "none"))).join("\n");
  }
  document.getElementById("details").textContent = text;
}

// -- moving about

function zoom(factor, x, y) {
  const scale = Math.min(6, Math.max(0.02, view.scale * factor));
  view.x = x - (x - view.x) * scale / view.scale;
  view.y = y - (y - view.y) * scale / view.scale;
  view.scale = scale;
  graph.later();
}
function whole() {
  const width = holder.clientWidth, height = holder.clientHeight;
  view.scale = Math.max(Math.min(width / (scene.width + 40), height / (scene.height + 40), 1.4), 0.02);
  view.x = (width - scene.width * view.scale) / 2;
  view.y = 16;
  graph.later();
}
function begin() {
  whole();
  if (view.scale >= 0.75) return;
  // In a narrow window the whole of the first column is in view.
  const scale = Math.min(1, (holder.clientWidth - 24) / scene.first);
  view = { x: Math.max(12, (holder.clientWidth - scene.width * scale) / 2), y: 12, scale };
}
holder.addEventListener("wheel", (event) => {
  const box = holder.getBoundingClientRect();
  if (event.ctrlKey || event.metaKey) {
    event.preventDefault();
    zoom(Math.exp(-event.deltaY * 0.0015), event.clientX - box.left, event.clientY - box.top);
    return;
  }
  // At its ends the page scrolls.
  const least = Math.min(holder.clientHeight - scene.height * view.scale - 20, 12);
  const next = Math.min(12, Math.max(least, view.y - event.deltaY));
  if (next === view.y) return;
  event.preventDefault();
  view.y = next;
  graph.later();
}, { passive: false });
let drag = null, moved = false;
function rowAt(event) {
  const box = holder.getBoundingClientRect();
  const x = (event.clientX - box.left - view.x) / view.scale, y = (event.clientY - box.top - view.y) / view.scale;
  const inside = (row) => x >= row.x && x <= row.x + row.width && y >= row.y &&
    y <= row.y + (row.frame ? HEAD : row.height);
  return shown.find((row) => !row.frame && inside(row)) || shown.findLast(inside);
}
holder.addEventListener("pointerdown", (event) => {
  drag = { x: event.clientX, y: event.clientY, left: view.x, top: view.y };
  moved = false;
});
holder.addEventListener("pointermove", (event) => {
  if (drag) return;
  const row = rowAt(event);
  holder.classList.toggle("over", Boolean(row));
  if (!row) { hideTip(); return; }
  const title = row.group ? row.group.name : data.ops[row.op][NAME];
  showTip(event, described(title, row.group ? row.group.path : data.ops[row.op][MODULE], row.ops));
});
holder.addEventListener("pointerleave", hideTip);
window.addEventListener("pointermove", (event) => {
  if (!drag) return;
  const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
  if (Math.abs(dx) + Math.abs(dy) > 4) { moved = true; holder.classList.add("dragging"); hideTip(); }
  if (moved) { view.x = drag.left + dx; view.y = drag.top + dy; graph.later(); }
});
window.addEventListener("pointerup", (event) => {
  const wasDown = drag !== null;
  drag = null;
  holder.classList.remove("dragging");
  if (!wasDown || moved) return;
  const row = rowAt(event);
  if (!row) return;
  if (row.group) { row.group.open = !row.group.open; arrange(); } else { choose(row.op); }
});

function graphTools() {
  const tools = document.getElementById("tools");
  const button = (text, action) => {
    const one = made("button", { type: "button" }, tools, text);
    one.addEventListener("click", action);
    return one;
  };
  button("unfold all", () => { openTo(1e9); arrange(); });
  button("fold all", () => { openTo(0); arrange(); });
  button("fit", whole);
  button("+", () => zoom(1.3, holder.clientWidth / 2, holder.clientHeight / 2)).title = "closer (or Ctrl and the wheel)";
  button("−", () => zoom(1 / 1.3, holder.clientWidth / 2, holder.clientHeight / 2)).title = "farther";
  const arrows = button("all arrows", () => {
    allEdges = !allEdges;
    arrows.classList.toggle("on", allEdges);
    connect();
    graph.later();
  });
  const search = made("input", { placeholder: PART === "stage" ? "stage" : "operation or module", "aria-label": "search" }, tools);
  search.addEventListener("input", () => {
    searched = search.value.trim().toLowerCase();
    mark();
    filterTable();
  });
  legend(tools, (data.planned ? [...FATES, "loss", "backward"] : PHASES).map((name) => [name, WORDS[name] || name]));
}
