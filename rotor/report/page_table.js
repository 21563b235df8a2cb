// Modules or operations as rows of text, of which only those in view are elements.
const LINE = 24, MOST_HEIGHT = 20;
let filterTable = () => {};

function table() {
  const place = document.getElementById("table");
  if (!place) return;
  const head = made("div", { class: "head" }, place), body = made("div", { class: "body" }, place);
  const spacer = made("div", { class: "spacer" }, body), lines = made("div", { class: "lines" }, body);
  const number = (title, value, show) => ({ title, value, show, isNumber: true });
  const text = (title, value) => ({ title, value, show: (v) => v, isNumber: false });
  const fates = (figuresOf) => data.planned
    ? FATES.map((fate) => number(fate, (row) => figuresOf(row)[fate], bytes)) : [];
  const tables = {
    modules: {
      rows: modules(),
      columns: [text("module", (row) => row.name || "(the model)"), number("operations", (row) => row.ops.length, String),
        number("time", (row) => row.sum.once, time),
        ...(data.planned ? [number("again", (row) => row.sum.again, String), number("extra time", (row) => row.sum.extra, time)] : []),
        number("makes", (row) => row.sum.makes, bytes), ...fates((row) => row.sum)],
    },
    operations: {
      rows: data.ops.map((op, k) => ({ op: k, name: op[NAME], sum: figures([k]), ops: [k] })),
      columns: [text("operation", (row) => row.name), text("module", (row) => data.ops[row.op][MODULE]),
        text("phase", (row) => PHASES[data.ops[row.op][PHASE]]),
        ...(data.planned ? [text("becomes", (row) => data.ops[row.op][KIND]), number("runs", (row) => row.sum.runs, String)] : []),
        number("time", (row) => row.sum.once, time), number("makes", (row) => row.sum.makes, bytes),
        number("workspace", (row) => row.sum.workspace, bytes)],
    },
  };
  // One row for each place, in the order of first use.
  function modules() {
    const found = new Map();
    data.ops.forEach((op, k) => {
      const list = found.get(op[PLACE]);
      if (list) list.push(k); else found.set(op[PLACE], [k]);
    });
    return Array.from(found, ([name, ops]) => ({ name, ops, sum: figures(ops) }));
  }
  let current = tables.modules.rows.length > 1 ? "modules" : "operations", order = null, down = true, rows = [];
  const tools = document.getElementById("table-tools");
  const buttons = Object.keys(tables).map((name) => {
    const one = made("button", { type: "button" }, tools, name);
    one.addEventListener("click", () => { current = name; order = null; build(); });
    return one;
  });
  const count = made("span", { class: "hint" }, tools);

  function build() {
    const { columns } = tables[current];
    buttons.forEach((one) => one.classList.toggle("on", one.textContent === current));
    head.textContent = "";
    const widths = columns.map((c) => c.isNumber ? "minmax(78px, 1fr)" : c.title === "phase" || c.title === "becomes" ? "90px" : "minmax(90px, 3fr)");
    place.style.setProperty("--columns", widths.join(" "));
    place.style.setProperty("--least", total(columns, (c) => c.isNumber ? 78 : 90) + "px");
    columns.forEach((column, k) => {
      const one = made("button", { type: "button", class: column.isNumber ? "number" : "" }, head,
        column.title + (order === k ? (down ? " ▾" : " ▴") : ""));
      one.addEventListener("click", () => {
        down = order === k ? !down : column.isNumber;
        order = k;
        build();
      });
    });
    select();
  }
  function select() {
    const { columns } = tables[current];
    rows = tables[current].rows.filter((row) => !searched || (row.op === undefined
      ? (row.name || "(the model)").toLowerCase().includes(searched)
      : (row.name + " " + data.ops[row.op][MODULE]).toLowerCase().includes(searched)));
    if (order !== null) {
      const value = columns[order].value;
      rows = rows.slice().sort((one, other) => {
        const a = value(one), b = value(other);
        return (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1);
      });
    }
    count.textContent = rows.length + " rows";
    spacer.style.height = rows.length * LINE + "px";
    body.style.height = Math.min(rows.length, MOST_HEIGHT) * LINE + "px";
    show();
  }
  function show() {
    const { columns } = tables[current];
    const first = Math.max(Math.floor(body.scrollTop / LINE) - 2, 0);
    const last = Math.min(first + MOST_HEIGHT + 6, rows.length);
    lines.textContent = "";
    lines.style.top = first * LINE + "px";
    for (let k = first; k < last; k += 1) {
      const row = rows[k], one = made("div", { class: "line" }, lines);
      for (const column of columns) {
        const cell = column.show(column.value(row));
        made("span", column.isNumber ? { class: "number" } : { title: cell }, one, cell);
      }
      one.addEventListener("click", () => choose(row.ops[0], true));
    }
  }
  body.addEventListener("scroll", () => requestAnimationFrame(show));
  filterTable = select;
  build();
}

openSome();
arrange();
begin();
graphTools();
timeline();
table();
