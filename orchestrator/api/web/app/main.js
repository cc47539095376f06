// The page: a bar, and below it the list of jobs or one job. A report is the same page with its data in it.
import { html, render, signal, useEffect, useState } from "app/html.js";
import { reachable, setToken, tokenWanted } from "app/api.js";
import { fixedSource, liveSource } from "app/source.js";
import { dark, toggle } from "app/theme.js";
import { go, path } from "app/go.js";
import { useKeys } from "app/keys.js";
import { Dialog } from "app/parts.js";
import { Help } from "app/help.js";
import { Jobs } from "app/jobs.js";
import { Job } from "app/job.js";
import { Compare } from "app/compare.js";

const inlined = document.getElementById("data");
const report = inlined && JSON.parse(inlined.textContent);
const round = signal(0); // counts tokens that were entered: everything is asked for again

function Bar({ onHelp }) {
  return html`<header class="bar">
    <a class="skip" href="#main">Skip to the content</a>
    ${report ? html`<span class="brand">rlhf-orchestrate <em>report</em></span>` : html`<a class="brand" href="/" data-page>rlhf-orchestrate</a>`}
    <span class="grow"></span>
    ${!report && html`<a href="/openapi.json">API</a>`}
    <button type="button" class="quiet" onClick=${toggle} aria-pressed=${dark.value}>${dark.value ? "Light" : "Dark"} theme</button>
    <button type="button" class="quiet" onClick=${onHelp} aria-keyshortcuts="?">Keys <kbd>?</kbd></button>
  </header>`;
}

function TokenDialog() {
  const [text, setText] = useState("");
  const said = tokenWanted.value;
  const enter = (event) => {
    event.preventDefault();
    setToken(text.trim());
    round.value += 1;
  };
  return html`<${Dialog} title="This server wants a token" onClose=${() => (tokenWanted.value = null)}>
    <form onSubmit=${enter}>
      <p>It stands in the server's token file, <code>name read|write token</code>, or in the address that the server printed. It is kept for this tab only.</p>
      ${said && html`<p class="bad" role="alert">${said}</p>`}
      <label>Token <input type="password" autocomplete="off" value=${text} onInput=${(e) => setText(e.target.value)} autofocus /></label>
      <div class="buttons"><button type="submit" class="main" disabled=${!text.trim()}>Go on</button></div>
    </form>
  </${Dialog}>`;
}

function App() {
  const [help, setHelp] = useState(false);
  useKeys({ "?": () => setHelp(true), t: toggle, ...(report ? {} : { g: () => go("/") }) });
  const id = path.value.match(/^\/jobs\/([a-z0-9-]+)$/)?.[1];
  const compared = path.value.match(/^\/compare\?jobs=([a-z0-9,-]+)$/)?.[1].split(",");
  useEffect(() => {
    if (!report && !id) document.title = `${compared ? "Compare" : "Jobs"} · rlhf-orchestrate`;
  }, [id, path.value]);
  return html`
    <${Bar} onHelp=${() => setHelp(true)} />
    ${!reachable.value && !report && !id && html`<p class="away-bar" role="status">The server does not answer. Jobs go on without it; trying again.</p>`}
    <main id="main" tabindex="-1">
      ${report
        ? html`<${Job} id=${report.job.id} source=${fixedSource(report)} made=${report.made_at} />`
        : id
          ? html`<${Job} key=${`${id} ${round.value}`} id=${id} source=${liveSource(id)} />`
          : compared
            ? html`<${Compare} key=${`${path.value} ${round.value}`} ids=${compared} />`
            : html`<${Jobs} key=${round.value} />`}
    </main>
    ${help && html`<${Help} onClose=${() => setHelp(false)} />`}
    ${tokenWanted.value !== null && html`<${TokenDialog} />`}
  `;
}

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
