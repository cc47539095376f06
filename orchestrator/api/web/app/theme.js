// Dark or light: as the system says, until the switch says otherwise.
import { signal, effect } from "app/html.js";

const KEY = "rlhf-theme";
const system = window.matchMedia("(prefers-color-scheme: dark)");
export const chosen = signal(remembered()); // "dark" | "light" | null: as the system
export const dark = signal(isDark());

function remembered() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // a file that a browser gives no storage
  }
}

function isDark() {
  return chosen.value ? chosen.value === "dark" : system.matches;
}

system.addEventListener("change", () => (dark.value = isDark()));
effect(() => {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  dark.value = isDark();
});

export function toggle() {
  chosen.value = dark.value ? "light" : "dark";
  try {
    localStorage.setItem(KEY, chosen.value);
  } catch {
    // then it holds for this page only
  }
}

// A colour of css/theme.css, for canvases.
export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// `share` of a colour, the rest surface: opaque, for areas that lie over each other.
export function mixed(ink, share) {
  const parts = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const ground = parts(color("surface"));
  return `rgb(${parts(ink).map((v, i) => Math.round(v * share + ground[i] * (1 - share))).join(" ")})`;
}
