// Which page is open; links with data-page change it without asking for the document again.
import { signal } from "app/html.js";

export const path = signal(location.pathname + location.search);

export function go(to) {
  history.pushState(null, "", to);
  path.value = location.pathname + location.search;
  document.getElementById("main")?.focus();
}
window.addEventListener("popstate", () => (path.value = location.pathname + location.search));
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[data-page]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  go(link.getAttribute("href"));
});
