// Live bytes along the program, and below, on the same axis, what runs when.
function timeline() {
  const holder = document.getElementById("timeline");
  if (!holder) return;
  // Without a program there is only what was measured.
  const isPlanned = data.program.length > 0;
  const L = 74, R = 14, T = 28, AXIS = 42, PICTURE = isPlanned ? 170 : 0, TRACK = moves.length ? 12 : 0, BOTTOM = isPlanned ? 24 : 2;
  const program = data.program, starts = new Float64Array(program.length + 1);
  // A wait for the second tier is before its run: the bars of runs end where it begins.
  const cost = (k) => Math.max(data.ops[program[k]][COST], 1);
  program.forEach((op, k) => { starts[k + 1] = starts[k] + cost(k) + (waits[k + 1] || 0); });
  const measured = data.measured === null ? [] : [].concat(data.measured);
  const traced = data.traced || [], plain = data.plain || [];
  const end = isPlanned ? starts[program.length] : Math.max(traced[traced.length - 1][0], 1);
  const marks = isPlanned ? [starts[data.boundary]] : data.marks;
  const highest = (list) => list.reduce((most, level) => Math.max(most, level), 0);
  const predictedPeak = highest(data.peak) + data.own, measuredPeak = highest(measured);
  const plainPeak = highest(plain.map((at) => at[1]));
  const most = Math.max(data.limit || 0, measuredPeak, predictedPeak, plainPeak, highest(traced.map((at) => at[1]))) || 1;
  let from = 0, to = end, width = 0, bottom = 0;

  // Of runs, the first makes what is dropped later, the others make it again.
  const seen = new Set();
  const kinds = program.map((op) => {
    const kind = data.ops[op][KIND], again = seen.has(op);
    seen.add(op);
    if (again) return "recomputed";
    return kind === "recomputed" ? (data.ops[op][PHASE] === 2 ? "backward" : "dropped") : kind;
  });
  const lanes = inLanes();
  const laneCount = lanes.reduce((high, lane) => Math.max(high, lane), 0) + 1;
  const laneNames = new Array(laneCount).fill("");
  data.ops.forEach((op, k) => { if (op[PHASE] === 0) laneNames[lanes[k]] = laneNames[lanes[k]] || blockOf(op); });

  // The last names of a stage, or of the block that an operation belongs to: up to the first number.
  function blockOf(op) {
    if (PART === "stage") return op[MODULE].split(".").slice(-2).join(".");
    const names = op[PLACE].split("."), first = names.findIndex((name) => /^[0-9]+$/.test(name));
    return names.slice(0, first < 0 ? 1 : first + 1).slice(-2).join(".");
  }

  // A backward stands where the forward of its module does; others are mirrored.
  function inLanes() {
    const forward = [], ranges = new Map(), found = new Array(data.ops.length).fill(0);
    data.ops.forEach((op, k) => {
      if (op[PHASE] === 2) return;
      found[k] = forward.length;
      const range = ranges.get(op[MODULE]);
      if (op[MODULE]) ranges.set(op[MODULE], range ? [range[0], forward.length] : [forward.length, forward.length]);
      forward.push(k);
    });
    const backward = data.ops.map((op, k) => k).filter((k) => data.ops[k][PHASE] === 2);
    backward.forEach((k, place) => {
      const range = PART === "stage" ? undefined : ranges.get(data.ops[k][MODULE]);
      found[k] = range ? Math.round((range[0] + range[1]) / 2)
        : Math.round((forward.length - 1) * (1 - (place + 1) / backward.length));
    });
    return found.map((lane) => Math.max(lane, 0));
  }
  const tools = document.getElementById("timeline-tools");
  const entries = !isPlanned ? [] : [["live", "predicted, peak " + bytes(predictedPeak)]];
  if (measured.length || traced.length) entries.push(["measured", "measured, peak " + bytes(measuredPeak)]);
  if (data.limit !== null) entries.push(["limit", "limit " + bytes(data.limit)]);
  if (plain.length) entries.push(["plain", "without recomputation, peak " + bytes(plainPeak)]);
  const kindsShown = isPlanned ? [...FATES, "loss", "backward", ...(moves.length ? ["waited"] : [])] : [];
  legend(tools, [...entries, ...kindsShown.map((name) => [name, WORDS[name] || name])]);
  const reset = made("button", { type: "button" }, tools, "whole step");
  reset.hidden = true;
  made("span", { class: "hint" }, tools, "drag to look closer" + (isPlanned ? ", click for the " + PART : ""));

  const x = (t) => L + (width - L - R) * (t - from) / (to - from);
  const timeAt = (place) => from + (place - L) / (width - L - R) * (to - from);
  const y = (level) => bottom - (bottom - T) * level / (most * 1.06);
  function runAt(t) {
    let low = 0, high = program.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (starts[middle] <= t) low = middle; else high = middle - 1;
    }
    return low;
  }
  function ticks(low, high, count, bases) {
    const raw = (high - low) / count, unit = Math.pow(bases, Math.floor(Math.log(raw) / Math.log(bases) + 1e-9));
    const steps = bases === 10 ? [1, 2, 5, 10] : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1024];
    let chosen = steps.findIndex((s) => s * unit >= raw * 0.999);
    while (chosen > 0 && steps[chosen] * unit > (high - low) / 2) chosen -= 1;
    const step = unit * steps[chosen];
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high * (1 + 1e-12); at += step) found.push(at);
    return found;
  }
  // A step function of time; where runs are thinner than a pixel, the highest in each.
  function steps(context, first, last, startOf, levelOf, isFilled) {
    context.beginPath();
    let column = -1, high = 0;
    const crowded = last - first > 2 * width;
    if (isFilled) context.moveTo(x(startOf(first)), y(0));
    for (let k = first; k < last; k += 1) {
      const a = x(startOf(k)), b = x(startOf(k + 1)), level = levelOf(k);
      if (crowded) {
        if (Math.floor(a) === column) { high = Math.max(high, level); continue; }
        if (column >= 0) { context.lineTo(column, y(high)); context.lineTo(column + 1, y(high)); }
        column = Math.floor(a);
        high = level;
      } else {
        context.lineTo(a, y(level));
        context.lineTo(b, y(level));
      }
    }
    if (crowded && column >= 0) context.lineTo(column + 1, y(high));
    if (isFilled) { context.lineTo(x(startOf(last)), y(0)); context.closePath(); }
  }
  function draw(context, w, h) {
    width = w;
    bottom = h - AXIS - PICTURE - BOTTOM;
    const first = runAt(from), last = Math.min(runAt(to) + 1, program.length);
    context.lineWidth = 1;
    context.fillStyle = colors.soft;
    context.strokeStyle = colors.line;
    context.textAlign = "right";
    for (const level of ticks(0, most * 1.06, 5, 1024)) {
      line(context, L, y(level), w - R, y(level));
      context.fillText(bytes(level), L - 6, y(level) + 4);
    }
    const times = ticks(from, to, Math.max(2, Math.floor((w - L - R) / 130)), 10);
    const digitsOf = (t) => to - from < t / 100 ? (t / 1e3).toFixed(1) + " us" : time(t);
    for (const t of times) {
      context.textAlign = x(t) > w - R - 24 ? "right" : x(t) < L + 10 ? "left" : "center";
      context.fillText(digitsOf(t), x(t), bottom + 16);
      line(context, x(t), bottom, x(t), bottom + 4);
      if (isPlanned) context.fillText(digitsOf(t), x(t), h - 7);
    }
    context.textAlign = "left";
    context.fillText("live bytes", 8, 14);
    if (isPlanned) context.fillText(PART === "stage" ? "stages" : "modules", 8, bottom + 36);
    context.textAlign = "right";
    context.fillText("time of the step", w - R, bottom + 36);
    if (isPlanned) laneLabels(context, h, first, last);
    context.save();
    context.beginPath();
    context.rect(L, 0, w - L - R, h);
    context.clip();
    if (plain.length) {
      steps(context, 0, plain.length - 1, (k) => plain[k][0], (k) => plain[Math.min(k, plain.length - 2)][1], true);
      context.fillStyle = colors.plain;
      context.fill();
      context.strokeStyle = colors["plain-line"];
      context.stroke();
    }
    if (isPlanned) {
      steps(context, first, last, (k) => starts[k], (k) => data.peak[k] + data.own, true);
      context.fillStyle = colors.live;
      context.fill();
      context.strokeStyle = colors["live-line"];
      context.stroke();
    }
    if (data.limit !== null) {
      context.strokeStyle = colors.limit;
      context.setLineDash([6, 4]);
      line(context, L, y(data.limit), w - R, y(data.limit));
    }
    context.strokeStyle = colors.measured;
    context.setLineDash([2, 3]);
    if (measured.length === 1 && !traced.length) line(context, L, y(measured[0]), w - R, y(measured[0]));
    context.setLineDash([]);
    if (measured.length > 1) {
      steps(context, first, last, (k) => starts[k], (k) => measured[k], false);
      context.stroke();
    }
    if (traced.length) {
      context.lineWidth = isPlanned ? 1.25 : 2;
      steps(context, 0, traced.length, (k) => traced[Math.min(k, traced.length - 1)][0], (k) => traced[k][1], false);
      context.stroke();
      context.lineWidth = 1;
    }
    if (isPlanned) picture(context, w, h, first, last);
    if (moves.length) tracks(context, w, h);
    context.strokeStyle = colors.soft;
    context.setLineDash([1, 3]);
    for (const at of marks) line(context, x(at), T, x(at), h - BOTTOM);
    context.setLineDash([]);
    if (isPlanned) {
      context.fillStyle = colors.soft;
      context.textAlign = "left";
      context.fillText("loss", x(marks[0]) + 4, T - 4);
    }
    context.restore();
  }
  function line(context, x1, y1, x2, y2) {
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x2, y2);
    context.stroke();
  }
  // The lanes in view, from the first to the last.
  function lanesBetween(first, last) {
    let low = 0, high = laneCount - 1;
    if (from > 0 || to < end) {
      [low, high] = [high, low];
      for (let k = first; k < last; k += 1) {
        low = Math.min(low, lanes[program[k]]);
        high = Math.max(high, lanes[program[k]]);
      }
    }
    return [low, high];
  }
  function laneLabels(context, h, first, last) {
    const [low, high] = lanesBetween(first, last);
    const space = PICTURE - 3 * TRACK;
    const top = h - PICTURE - BOTTOM, lane = Math.min(space / (high - low + 1), 24);
    let name = "", least = top + 10;
    context.textAlign = "right";
    for (let k = low; k <= high; k += 1) {
      const y = top + (k - low) * lane + (lane > 12 ? lane / 2 + 4 : 10);
      if (!laneNames[k] || laneNames[k] === name) continue;
      name = laneNames[k];
      if (y < least || y > h - BOTTOM - 3 * TRACK) continue;
      context.fillText(fit(context, name, L - 12), L - 6, y);
      least = y + 13;
    }
    const tracks = TRACK ? ["written", "fetched", "waited"] : [];
    tracks.forEach((name, k) => context.fillText(name, L - 6, h - BOTTOM - (2 - k) * TRACK - 2));
  }
  function picture(context, w, h, first, last) {
    const [low, high] = lanesBetween(first, last);
    const space = PICTURE - 3 * TRACK;
    const top = h - PICTURE - BOTTOM, lane = Math.min(space / (high - low + 1), 24);
    const height = Math.max(lane - (lane > 4 ? 1 : 0), 1.5);
    context.strokeStyle = colors.line;
    context.strokeRect(L + 0.5, top - 0.5, w - L - R - 1, PICTURE + 1);
    // What is recomputed is never too small to be seen, and hides nothing.
    for (const isAgain of [true, false]) {
      for (let k = first; k < last; k += 1) {
        if ((kinds[k] === "recomputed") !== isAgain) continue;
        const a = x(starts[k]), b = x(starts[k] + cost(k)), least = isAgain ? 2 : 1;
        context.fillStyle = colors[kinds[k]][1];
        context.fillRect(a, top + (lanes[program[k]] - low) * lane, Math.max(b - a, least), Math.max(height, 1.5 * least));
      }
    }
  }
  // What is written, what is fetched, and when a run waits for it.
  function tracks(context, w, h) {
    const top = h - BOTTOM - 3 * TRACK;
    context.strokeStyle = colors.line;
    line(context, L, top - 0.5, w - R, top - 0.5);
    context.fillStyle = colors.offloaded[1];
    for (const move of moves) {
      const a = x(move[BEGIN]), b = x(move[END]);
      context.fillRect(a, top + move[DIRECTION] * TRACK + 1, Math.max(b - a - 0.5, 1), TRACK - 2);
    }
    context.fillStyle = colors.limit;
    waits.forEach((wait, k) => {
      if (wait) context.fillRect(x(starts[k] - wait), top + 2 * TRACK + 1, Math.max(x(starts[k]) - x(starts[k] - wait), 1), TRACK - 2);
    });
  }
  function moving(t) {
    const words = ["being written", "being fetched"];
    return moves.filter((move) => move[BEGIN] <= t && t < move[END]).map((move) => {
      const storage = data.storages[move[MOVED]];
      return `\n${words[move[DIRECTION]]}: ${data.ops[storage[MAKER]][NAME]}, ${bytes(storage[SIZE])}`;
    }).join("");
  }
  const drawn = canvas(holder, "live bytes over the time of a step, and the operations that run", draw);
  const cursor = made("div", { class: "cursor" }, holder), range = made("div", { class: "range" }, holder);
  const levelAt = (t, levels = traced) => {
    let low = 0, high = levels.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (levels[middle][0] <= t) low = middle; else high = middle - 1;
    }
    return levels[low][1];
  };
  const placeOf = (event) => {
    const left = event.clientX - holder.getBoundingClientRect().left;
    return Math.min(Math.max(left, L), width - R);
  };
  let pressed = null;
  holder.addEventListener("pointermove", (event) => {
    const place = placeOf(event), t = timeAt(place);
    cursor.style.left = place + "px";
    cursor.style.display = "block";
    if (pressed !== null && Math.abs(place - pressed) > 4) {
      range.style.display = "block";
      range.style.left = Math.min(place, pressed) + "px";
      range.style.width = Math.abs(place - pressed) + "px";
    }
    if (!isPlanned) { showTip(event, `measured after ${time(t)}: ${bytes(levelAt(t))}`); return; }
    const k = runAt(t), op = data.ops[program[k]];
    showTip(event, `run ${k}: ${data.labels ? data.labels[k] : op[NAME]} (${kinds[k]})\n${PART === "stage" ? "stage" : "module"}: ${op[MODULE] || "(the model)"}\n` +
      (op[SOURCE] ? op[SOURCE] + "\n" : "") +
      `begins at ${time(starts[k])}, takes ${time(op[COST])}` +
      (waits[k] ? `\nwaits for the second tier before: ${time(waits[k])}` : "") + moving(t) + `\nlive before: ${bytes(data.before[k] + data.own)}\n` +
      `live while it runs: ${bytes(data.peak[k] + data.own)}` +
      (measured.length > 1 ? `\nmeasured: ${bytes(measured[k])}` : "") +
      (traced.length ? `\nmeasured then: ${bytes(levelAt(t))}` : "") +
      (plain.length ? `\nwithout recomputation then: ${bytes(levelAt(t, plain))}` : ""));
  });
  const away = () => {
    cursor.style.display = "none";
    range.style.display = "none";
    hideTip();
  };
  holder.addEventListener("pointerleave", () => { pressed = null; away(); });
  holder.addEventListener("pointerdown", (event) => { pressed = placeOf(event); event.preventDefault(); });
  holder.addEventListener("pointerup", (event) => {
    const place = placeOf(event), begin = pressed;
    pressed = null;
    range.style.display = "none";
    if (begin === null) return;
    if (Math.abs(place - begin) <= 4) {
      if (isPlanned) choose(program[runAt(timeAt(place))], true);
      return;
    }
    const bounds = [timeAt(Math.min(place, begin)), timeAt(Math.max(place, begin))];
    if (bounds[1] - bounds[0] < 2) return;
    [from, to] = bounds;
    reset.hidden = false;
    drawn.later();
  });
  reset.addEventListener("click", () => { from = 0; to = end; reset.hidden = true; drawn.later(); });
}
