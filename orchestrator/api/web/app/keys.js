// Shortcuts. A part adds its own while it is shown (before it is painted: what is seen works); keys typed into a field
// are the field's.
import { useLayoutEffect } from "app/html.js";

const handlers = new Map(); // key -> stack of functions

export function useKeys(keys) {
  useLayoutEffect(() => {
    for (const [key, handler] of Object.entries(keys)) handlers.set(key, [...(handlers.get(key) ?? []), handler]);
    return () => {
      for (const [key, handler] of Object.entries(keys)) {
        handlers.set(key, handlers.get(key).filter((one) => one !== handler));
      }
    };
  });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (event.target.closest?.("input, select, textarea, dialog, [contenteditable]")) return;
  const handler = handlers.get(event.key)?.at(-1);
  if (handler) {
    event.preventDefault();
    handler(event);
  }
});
