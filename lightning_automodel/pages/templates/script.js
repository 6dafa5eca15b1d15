"use strict";

// A click on a heading sorts a table: down first where it holds numbers. #sort=TABLE:HEADING:up does the same.
function sortTable(table, column, down) {
  const key = row => {
    const cell = row.cells[column];
    return "order" in cell.dataset ? Number(cell.dataset.order) : cell.textContent;
  };
  const compare = (a, b) => {
    const [x, y] = [key(a), key(b)];
    if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1; // what has no number comes last
    const order = typeof x === "number" ? x - y : x.localeCompare(y);
    return down ? -order : order;
  };
  const body = table.tBodies[0];
  body.append(...[...body.rows].sort(compare));
  [...table.tHead.rows[0].cells].forEach((cell, i) => {
    if (i === column) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  });
}

for (const table of document.querySelectorAll("table")) {
  [...table.tHead.rows[0].cells].forEach((cell, i) => cell.addEventListener("click", () => {
    const before = cell.getAttribute("aria-sort");
    const down = before ? before === "ascending" : cell.classList.contains("number");
    sortTable(table, i, down);
    const name = encodeURIComponent(cell.textContent.trim());
    history.replaceState(null, "", `#sort=${table.id}:${name}:${down ? "down" : "up"}`);
  }));
}

const wanted = decodeURIComponent(location.hash).match(/^#sort=(\w+):(.+):(up|down)$/);
if (wanted) {
  const table = document.getElementById(wanted[1]);
  const column = [...(table?.tHead?.rows[0].cells ?? [])].findIndex(cell => cell.textContent.trim() === wanted[2]);
  if (column >= 0) sortTable(table, column, wanted[3] === "down");
}

// What a chart holds where the pointer is, below the chart.
for (const svg of document.querySelectorAll("svg[data-frame]")) {
  const numbers = name => svg.dataset[name].split(" ").map(Number);
  const [[x0, x1], [y0, y1], [left, top, right, bottom]] = ["x", "y", "frame"].map(numbers);
  const lines = [...svg.querySelectorAll("polyline")].map(line => ({
    name: line.dataset.name,
    points: line.getAttribute("points").trim().split(/\s+/).filter(Boolean).map(pair => pair.split(",").map(Number)),
  })).filter(line => line.points.length);
  const output = svg.parentElement.querySelector("output");
  const mark = document.createElementNS(svg.namespaceURI, "line");
  mark.setAttribute("class", "cursor");
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const nearest = points => points.reduce((a, b) => Math.abs(a[0] - at) <= Math.abs(b[0] - at) ? a : b);
    const found = lines.map(line => [line.name, ...nearest(line.points)]);
    if (!found.length) return;
    const value = y => Number((y0 + (bottom - y) / (bottom - top) * (y1 - y0)).toPrecision(4));
    const x = found[0][1];
    for (const [name, place] of [["x1", x], ["x2", x], ["y1", top], ["y2", bottom]]) mark.setAttribute(name, place);
    svg.append(mark);
    const place = Math.round(x0 + (x - left) / (right - left) * (x1 - x0)).toLocaleString("en");
    const values = found.map(([name, , y]) => found.length > 1 ? `${name}: ${value(y)}` : value(y));
    output.textContent = `${svg.dataset.over} ${place}: ${values.join(", ")}`;
  });
  svg.addEventListener("pointerleave", () => { mark.remove(); output.textContent = ""; });
}
