"use strict";

// A field above tables of families that leaves the rows with the words that are typed: #family=llama does the same.
(() => {
  const tables = [...document.querySelectorAll("article table")]
    .filter(table => table.tHead?.rows[0]?.cells[0]?.textContent.trim() === "family");
  if (!tables.length) return;
  const rows = tables.flatMap(table => [...table.tBodies[0].rows]);
  const field = document.createElement("input");
  field.type = "search";
  field.placeholder = "family, such as qwen3 or llama";
  field.setAttribute("aria-label", "show families");
  const count = document.createElement("output");
  const bar = document.createElement("div");
  bar.className = "filter";
  bar.append(field, count);
  (document.querySelector("article h2") ?? tables[0]).before(bar);
  const filter = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter(row => {
      const name = row.cells[0].textContent.toLowerCase();
      return row.hidden = !words.every(word => name.includes(word)), !row.hidden;
    });
    for (const table of tables) {
      (table.closest(".md-typeset__scrollwrap") ?? table).hidden = [...table.tBodies[0].rows].every(row => row.hidden);
    }
    count.textContent = words.length ? `${found.length} of ${rows.length} rows` : "";
  };
  field.addEventListener("input", filter);
  const wanted = decodeURIComponent(location.hash).match(/^#family=(.+)$/);
  if (wanted) { field.value = wanted[1]; filter(); }
})();
