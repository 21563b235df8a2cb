"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const NAME = 0, MODULE = 1, PHASE = 2, COST = 3, WORKSPACE = 4, INPUTS = 5, OUTPUTS = 6;
  const FLAGS = 7, RUNS = 8, KIND = 9, PLACE = 10;
  const PHASES = ["forward", "loss", "backward"];
  const ROW = 20, WIDTH = 300, HEAD = 20, PAD = 6, GAP = 4, COLUMN = 520, MOST_ROWS = 160, LOT = 50;
  const SVG = "http://www.w3.org/2000/svg";

  function bytes(n) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let k = 0;
    while (Math.abs(n) >= 1024 && k < units.length - 1) { n /= 1024; k += 1; }
    return (k ? n.toFixed(2) : String(n)) + " " + units[k];
  }
  function time(ns) {
    if (ns >= 1e9) return (ns / 1e9).toFixed(3) + " s";
    if (ns >= 1e6) return (ns / 1e6).toFixed(2) + " ms";
    return (ns / 1e3).toFixed(1) + " us";
  }
  function element(name, attributes, parent, text) {
    const made = document.createElementNS(SVG, name);
    for (const key of Object.keys(attributes || {})) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.appendChild(made);
    return made;
  }
  function total(list, size) { return list.reduce((sum, item) => sum + size(item), 0); }
  const makes = (op) => total(data.ops[op][OUTPUTS], (s) => data.storages[s][0]);

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
        while (here !== root && path !== here.path && !path.startsWith(here.path + ".")) {
          here = here.parent;
        }
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
  function rows(group, depth) {
    let count = 0;
    for (const item of group.items) {
      count += typeof item === "number" || item.depth > depth ? 1 : 1 + rows(item, depth);
    }
    return count;
  }
  function openTo(depth) {
    for (const root of columns) walk(root, (group) => { group.open = group.depth <= depth; });
  }
  function openSome() {
    let depth = 0;
    while (depth < 12 && rows(columns[0], depth + 1) + rows(columns[1], depth + 1) <= MOST_ROWS) {
      depth += 1;
    }
    openTo(depth);
  }

  function kindOf(ops) {
    const kinds = new Set(ops.map((op) => data.ops[op][KIND]));
    return ["recomputed", "kept", "dropped", "loss", "forward", "backward"].find((k) => kinds.has(k));
  }
  function figures(ops) {
    const fates = {};
    for (const op of ops) {
      for (const s of data.ops[op][OUTPUTS]) {
        const fate = data.storages[s][3];
        if (fate) fates[fate] = (fates[fate] || 0) + data.storages[s][0];
      }
    }
    return {
      once: total(ops, (op) => data.ops[op][COST]),
      extra: total(ops, (op) => (data.ops[op][RUNS] - 1) * data.ops[op][COST]),
      makes: total(ops, makes),
      runs: ops.reduce((most, op) => Math.max(most, data.ops[op][RUNS]), 0),
      workspace: ops.reduce((most, op) => Math.max(most, data.ops[op][WORKSPACE]), 0),
      fates,
    };
  }
  function described(title, module, ops) {
    const sum = figures(ops);
    const lines = [title, "module: " + (module || "(the model)"),
      "phase: " + PHASES[data.ops[ops[0]][PHASE]],
      "time: " + time(sum.once) + (sum.extra ? " + " + time(sum.extra) + " again" : ""),
      "makes: " + bytes(sum.makes), "workspace: " + bytes(sum.workspace),
      "runs: " + (ops.length > 1 ? "up to " : "") + sum.runs];
    if (ops.length > 1) lines.push("operations: " + ops.length);
    for (const fate of ["kept", "dropped", "recomputed"]) {
      if (sum.fates[fate]) lines.push(fate + ": " + bytes(sum.fates[fate]));
    }
    if (ops.length === 1) {
      const flags = data.ops[ops[0]][FLAGS];
      if (flags & 1) lines.push("random: replays its numbers");
      if (flags & 2) lines.push("runs exactly once");
    }
    return lines.join("\n");
  }

  // -- layout and drawing

  const holder = document.getElementById("graph");
  const svg = element("svg", {}, holder);
  const scene = element("g", {}, svg);
  let shown = [], place = new Map(), chosen = null, allEdges = false, searched = "";
  let view = { x: 0, y: 0, scale: 1 };

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
  function draw() {
    scene.textContent = "";
    shown = [];
    place = new Map();
    const lists = columns.map(() => []);
    const widths = columns.map((root) => WIDTH + 2 * PAD * depthOf(root));
    const ends = columns.map((root, k) => layout(root, k * COLUMN, 24, widths[k], lists[k], k === 1));
    const low = Math.max(ends[0], ends[1]);
    ["forward and loss, downwards", "backward, upwards"].forEach((title, k) => {
      if (lists[k].length) element("text", { x: k * COLUMN, y: 12 }, scene, title);
      // The backward begins where the forward ends: at the bottom.
      if (k === 1) for (const row of lists[k]) row.y += low - ends[k];
      shown.push(...lists[k]);
    });
    const under = element("g", {}, scene), edges = element("g", { id: "edges" }, scene);
    const over = element("g", {}, scene);
    for (const row of shown) {
      if (!row.frame) for (const op of row.ops) place.set(op, row);
      drawRow(row, row.frame ? under : over);
    }
    drawEdges(edges);
    mark();
  }
  function fit(text, width) {
    const most = Math.max(4, Math.floor(width / 6.1));
    return text.length > most ? text.slice(0, most - 1) + "…" : text;
  }
  function drawRow(row, parent) {
    const g = element("g", { class: "row" }, parent);
    row.g = g;
    const title = row.group ? row.group.name : data.ops[row.op][NAME];
    element("title", {}, g, described(title, row.group ? row.group.path : data.ops[row.op][MODULE], row.ops));
    const kind = row.frame ? "group" : kindOf(row.ops);
    const shape = { x: row.x, y: row.y, width: row.width, height: row.height, rx: 4 };
    element("rect", Object.assign(shape, { class: "box " + kind }), g);
    const sum = figures(row.ops);
    if (row.ops.length > 1 && !row.frame) shares(row, sum, g);
    let right = time(sum.once + sum.extra) + " · " + bytes(sum.makes);
    if (sum.runs > 1 && row.op !== undefined) right = "×" + sum.runs + " · " + right;
    const sign = row.group ? (row.frame ? "▾ " : "▸ ") : "";
    const label = row.group ? row.group.name + " (" + row.ops.length + ")" : data.ops[row.op][NAME];
    const space = row.width - right.length * 5.8 - 20;
    element("text", { x: row.x + 6, y: row.y + 14 }, g, fit(sign + label, space));
    const place = { x: row.x + row.width - 6, y: row.y + 14, "text-anchor": "end", class: "small" };
    element("text", place, g, right);
    g.addEventListener("click", (event) => {
      event.stopPropagation();
      if (moved) return;
      if (row.group) { row.group.open = !row.group.open; draw(); } else { choose(row.op); }
    });
  }
  // What is kept, dropped and recomputed of a folded group's bytes.
  function shares(row, sum, parent) {
    const all = total(Object.keys(sum.fates), (fate) => sum.fates[fate]);
    let x = row.x + 1;
    for (const fate of ["kept", "dropped", "recomputed"]) {
      const width = all ? (row.width - 2) * (sum.fates[fate] || 0) / all : 0;
      const strip = { x: x.toFixed(1), y: row.y + row.height - 4, width: width.toFixed(1), height: 3 };
      if (width > 0) element("rect", Object.assign(strip, { class: "strip " + fate }), parent);
      x += width;
    }
  }
  function curve(from, to) {
    const sameColumn = Math.abs(from.x - to.x) < COLUMN / 2;
    const y1 = from.y + from.height / 2, y2 = to.y + to.height / 2;
    if (sameColumn) {
      const left = from.x >= COLUMN / 2;
      const x1 = left ? from.x : from.x + from.width, x2 = left ? to.x : to.x + to.width;
      const bow = (left ? -1 : 1) * Math.min(90, 18 + Math.abs(y2 - y1) / 6);
      return `M${x1},${y1} C${x1 + bow},${y1} ${x2 + bow},${y2} ${x2},${y2}`;
    }
    const right = from.x < to.x;
    const x1 = right ? from.x + from.width : from.x, x2 = right ? to.x : to.x + to.width;
    const middle = (x1 + x2) / 2;
    return `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}`;
  }
  function drawEdges(parent) {
    const drawn = new Set();
    const add = (from, to, kind) => {
      if (!from || !to || from === to) return;
      const path = curve(from, to), key = kind + path;
      if (!drawn.has(key)) { drawn.add(key); element("path", { d: path, class: "edge " + kind }, parent); }
    };
    data.ops.forEach((op, k) => {
      for (const s of op[INPUTS]) {
        const maker = data.storages[s][2];
        if (allEdges) add(place.get(maker), place.get(k), "");
        if (chosen === k) add(place.get(maker), place.get(k), "in");
        if (chosen === maker) add(place.get(maker), place.get(k), "out");
      }
    });
  }
  function mark() {
    for (const row of shown) {
      const hit = row.op !== undefined && row.op === chosen;
      row.g.classList.toggle("chosen", hit);
      const found = !searched || row.ops.some((op) =>
        (data.ops[op][NAME] + " " + data.ops[op][MODULE]).toLowerCase().includes(searched));
      row.g.classList.toggle("faint", !found);
    }
  }
  function reveal(op) {
    for (const root of columns) {
      walk(root, (group) => { if (group.ops.includes(op)) group.open = true; });
    }
  }
  function choose(op, jump) {
    chosen = op;
    if (jump) reveal(op);
    draw();
    const row = place.get(op);
    if (jump && row) {
      const size = svg.getBoundingClientRect();
      view.x = size.width / 2 - (row.x + row.width / 2) * view.scale;
      view.y = size.height / 2 - row.y * view.scale;
      apply();
    }
    const it = data.ops[op];
    const part = (s, far) => "  storage " + s + ": " + bytes(data.storages[s][0]) +
      (data.storages[s][3] ? ", " + data.storages[s][3] : "") + (data.storages[s][1] ? ", stays" : "") + far;
    const readers = (s) => data.ops.filter((other) => other[INPUTS].includes(s)).map((o) => o[NAME]);
    document.getElementById("details").textContent = described(it[NAME], it[MODULE], [op]) +
      "\nreads:\n" + it[INPUTS].map((s) => part(s, ", made by " + data.ops[data.storages[s][2]][NAME])).join("\n") +
      "\nmakes:\n" + it[OUTPUTS].map((s) => part(s, ", read by " + (readers(s).join(", ") || "nobody"))).join("\n");
  }

  // -- moving about

  let moved = false, drag = null;
  function apply() {
    scene.setAttribute("transform", `translate(${view.x},${view.y}) scale(${view.scale})`);
  }
  function whole() {
    const box = scene.getBBox(), size = svg.getBoundingClientRect();
    const scale = Math.min(size.width / (box.width + 40), size.height / (box.height + 40), 1.4);
    view.scale = Math.max(scale, 0.02);
    view.x = (size.width - box.width * view.scale) / 2 - box.x * view.scale;
    view.y = 20 * view.scale - box.y * view.scale;
    apply();
  }
  function begin() {
    whole();
    if (view.scale < 0.75) {
      view = { x: Math.max(20, svg.getBoundingClientRect().width / 2 - COLUMN * 0.8), y: 12, scale: 1 };
      apply();
    }
  }
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = svg.getBoundingClientRect(), factor = Math.exp(-event.deltaY * 0.0015);
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const scale = Math.min(6, Math.max(0.02, view.scale * factor));
    view.x = x - (x - view.x) * scale / view.scale;
    view.y = y - (y - view.y) * scale / view.scale;
    view.scale = scale;
    apply();
  }, { passive: false });
  svg.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, y: event.clientY, left: view.x, top: view.y };
    moved = false;
  });
  window.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
    if (Math.abs(dx) + Math.abs(dy) > 4) { moved = true; svg.classList.add("dragging"); }
    if (moved) { view.x = drag.left + dx; view.y = drag.top + dy; apply(); }
  });
  window.addEventListener("pointerup", () => { drag = null; svg.classList.remove("dragging"); });

  // -- the tools above the graph

  const tools = document.getElementById("tools");
  function button(text, action) {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.addEventListener("click", action);
    tools.appendChild(made);
  }
  button("unfold all", () => { openTo(1e9); draw(); });
  button("fold all", () => { openTo(0); draw(); });
  button("fit", whole);
  button("all arrows", () => { allEdges = !allEdges; draw(); });
  const search = document.createElement("input");
  search.placeholder = "operation or module";
  search.addEventListener("input", () => { searched = search.value.trim().toLowerCase(); mark(); });
  tools.appendChild(search);
  const keys = data.planned ? ["kept", "dropped", "recomputed", "loss", "backward"] : PHASES;
  for (const name of keys) {
    const key = document.createElement("span"), patch = document.createElement("i");
    key.className = "key";
    patch.className = name;
    key.append(patch, name);
    tools.appendChild(key);
  }

  // -- live bytes along the program

  function timeline() {
    const place = document.getElementById("timeline");
    if (!place || !data.program.length) return;
    const W = 1200, H = 260, L = 78, R = 14, T = 14, B = 30;
    const chart = element("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none" }, place);
    const starts = [0];
    for (const op of data.program) starts.push(starts[starts.length - 1] + Math.max(data.ops[op][COST], 1));
    const end = starts[starts.length - 1];
    const measured = data.measured === null ? [] : [].concat(data.measured);
    const traced = data.traced || [];
    let top = Math.max(data.limit || 0, measured.reduce((a, b) => Math.max(a, b), 0));
    top = traced.reduce((most, moment) => Math.max(most, moment[1]), top);
    top = data.peak.reduce((most, level) => Math.max(most, level + data.own), top) * 1.06 || 1;
    const x = (t) => (L + (W - L - R) * t / end).toFixed(1);
    const y = (level) => (H - B - (H - T - B) * level / top).toFixed(1);
    for (let k = 0; k <= 4; k += 1) {
      const level = top * k / 4;
      element("line", { x1: L, x2: W - R, y1: y(level), y2: y(level), class: "axis" }, chart);
      element("text", { x: L - 6, y: Number(y(level)) + 4, "text-anchor": "end", class: "small" }, chart, bytes(Math.round(level)));
      const at = { x: x(end * k / 4), y: H - 10, "text-anchor": k === 4 ? "end" : "middle", class: "small" };
      element("text", at, chart, time(end * k / 4));
    }
    const corners = data.peak.map((level, k) =>
      `L${x(starts[k])},${y(level + data.own)} L${x(starts[k + 1])},${y(level + data.own)}`);
    element("path", { d: `M${L},${y(0)} ${corners.join(" ")} L${x(end)},${y(0)} Z`, class: "live" }, chart);
    if (data.limit !== null) {
      element("line", { x1: L, x2: W - R, y1: y(data.limit), y2: y(data.limit), class: "limit" }, chart);
      element("text", { x: L + 6, y: Number(y(data.limit)) - 4, class: "small" }, chart, "limit " + bytes(data.limit));
    }
    if (measured.length === 1) {
      element("line", { x1: L, x2: W - R, y1: y(measured[0]), y2: y(measured[0]), class: "measured" }, chart);
      element("text", { x: W - R - 6, y: Number(y(measured[0])) - 4, "text-anchor": "end", class: "small" }, chart, "measured peak " + bytes(measured[0]));
    } else if (measured.length) {
      const steps = measured.map((level, k) => `${x(starts[k])},${y(level)} ${x(starts[k + 1])},${y(level)}`);
      element("polyline", { points: steps.join(" "), class: "measured" }, chart);
    }
    if (traced.length) {
      const path = traced.map(([at, level], k) => (k ? `H${x(at)} V` : `M${x(at)},`) + y(level));
      element("path", { d: path.join(" "), class: "traced" }, chart);
    }
    const levelAt = (t) => {
      let low = 0, high = traced.length - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (traced[middle][0] <= t) low = middle; else high = middle - 1;
      }
      return traced[low][1];
    };
    if (data.boundary < data.program.length) {
      const at = x(starts[data.boundary]);
      element("line", { x1: at, x2: at, y1: T, y2: H - B, class: "axis" }, chart);
      element("text", { x: Number(at) + 4, y: T + 10, class: "small" }, chart, "loss");
    }
    const cursor = element("line", { y1: T, y2: H - B, class: "cursor", visibility: "hidden" }, chart);
    const tip = element("title", {}, chart);
    const timeOf = (event) => {
      const box = chart.getBoundingClientRect();
      return ((event.clientX - box.left) / box.width * W - L) / (W - L - R) * end;
    };
    const found = (event) => {
      const t = timeOf(event);
      let low = 0, high = data.program.length - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (starts[middle] <= t) low = middle; else high = middle - 1;
      }
      return low;
    };
    chart.addEventListener("pointermove", (event) => {
      const k = found(event), op = data.ops[data.program[k]], at = x(starts[k]);
      cursor.setAttribute("x1", at);
      cursor.setAttribute("x2", at);
      cursor.setAttribute("visibility", "visible");
      tip.textContent = `run ${k}: ${op[NAME]}\nmodule: ${op[MODULE] || "(the model)"}\nlive before: ` +
        `${bytes(data.before[k] + data.own)}\nlive while it runs: ${bytes(data.peak[k] + data.own)}` +
        (measured.length > 1 ? `\nmeasured: ${bytes(measured[k])}` : "") +
        (traced.length ? `\nmeasured then: ${bytes(levelAt(timeOf(event)))}` : "");
    });
    chart.addEventListener("click", (event) => { choose(data.program[found(event)], true); });
  }

  openSome();
  draw();
  begin();
  timeline();
})();
