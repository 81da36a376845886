"use strict";
(() => {
  // Tables: sorted by their heads, filtered by a word. Without this script they are read as they are.
  const key = cell => (cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v));
  const empty = cell => cell.textContent === "" || cell.textContent === "–";
  const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));

  function sort(table, column, head) {
    const descending = head.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => {
      const [x, y] = [a.cells[column], b.cells[column]];
      if (empty(x) || empty(y)) return empty(x) - empty(y);
      return descending ? order(key(y), key(x)) : order(key(x), key(y));
    });
    table.tBodies[0].append(...rows);
  }

  for (const table of document.querySelectorAll("table")) {
    const rows = [...table.tBodies[0].rows];
    if (rows.length < 3) continue;
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.textContent = head.textContent || "name";
      button.title = "Sort";
      button.addEventListener("click", () => sort(table, column, head));
      head.replaceChildren(button);
    });
    if (rows.length < 9) continue;
    const filter = document.createElement("input");
    filter.type = "search";
    filter.className = "filter";
    filter.placeholder = filter.ariaLabel = "Filter rows";
    filter.addEventListener("input", () => {
      const word = filter.value.toLowerCase();
      for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(word);
    });
    table.parentElement.before(filter);
  }

  // Points of plots say what they are, to a mouse and to a finger.
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);
  const show = event => {
    const point = event.target.closest?.("[data-tip]");
    tip.hidden = !point;
    if (!point) return;
    tip.textContent = point.dataset.tip;
    tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 4)) + "px";
    tip.style.top = Math.max(4, event.clientY - tip.offsetHeight - 10) + "px";
  };
  document.addEventListener("pointermove", show);
  document.addEventListener("pointerdown", show);

  // A print shows what is folded.
  addEventListener("beforeprint", () => {
    for (const folded of document.querySelectorAll("main > details")) folded.open = true;
  });
})();
