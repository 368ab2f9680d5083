
"use strict";
(() => {
  // Each title becomes a label. Otherwise the browser would show a second tooltip beside ours.
  for (const title of document.querySelectorAll(".mark > title")) {
    const mark = title.parentNode;
    mark.dataset.tip = title.textContent;
    mark.setAttribute("aria-label", title.textContent);
    title.remove();
  }

  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "tooltip");
  document.body.append(tip);

  const place = (x, y) => {
    const box = tip.getBoundingClientRect();
    const right = document.documentElement.clientWidth;
    tip.style.left = Math.max(8, Math.min(x + 12, right - box.width - 8)) + "px";
    const above = y - box.height - 10;
    tip.style.top = (above > 8 ? above : y + 16) + "px";
  };
  const show = (target, x, y) => {
    tip.textContent = target.dataset.tip;
    tip.hidden = false;
    place(x, y);
  };
  const hide = () => { tip.hidden = true; };
  const tipped = (event) => event.target.closest?.("[data-tip]");

  document.addEventListener("pointermove", (event) => {
    const target = tipped(event);
    if (target) show(target, event.clientX, event.clientY);
    else if (!document.activeElement?.dataset?.tip) hide();
  });
  document.addEventListener("focusin", (event) => {
    const target = tipped(event);
    if (!target) return hide();
    const box = target.getBoundingClientRect();
    show(target, box.left + box.width / 2, box.top);
  });
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", hide, { passive: true });

  // The tab key stops once per chart; the arrow keys go from mark to mark.
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    const chart = event.target.closest?.("svg.chart");
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!chart || !step) return;
    const marks = [...chart.querySelectorAll(".mark")];
    if (!marks.length) return;
    const now = marks.indexOf(event.target);
    const next = now < 0 ? (step > 0 ? 0 : marks.length - 1) : now + step;
    marks[(next + marks.length) % marks.length].focus({ preventScroll: true });
    event.preventDefault();
  });

  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.sort ?? cell.textContent.trim();
  };
  const compare = (left, right) => {
    const numbers = [Number(left), Number(right)];
    if (left !== "" && right !== "" && !numbers.some(Number.isNaN)) return numbers[0] - numbers[1];
    return left.localeCompare(right);
  };
  const missing = (text) => text === "" || text === "–";
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows].sort((one, other) => {
        const [left, right] = [key(one, column), key(other, column)];
        // Rows without a figure come last in both directions.
        if (missing(left) || missing(right)) return missing(left) - missing(right);
        return compare(left, right) * (down ? -1 : 1);
      });
      table.tBodies[0].append(...rows);
    }));
  }

  const open = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target?.tagName !== "DETAILS") return;
    target.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", open);
  open();
})();
