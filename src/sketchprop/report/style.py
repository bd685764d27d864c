"""The style sheet of the page: system fonts, light and dark by what the reader's system says."""

STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f8; --sheet: #ffffff; --ink: #1c2126; --soft: #566069; --line: #d9dee2;
  --exact: #98a2ab; --sketched: #0b6bb5; --good: #14804a; --bad: #bf4d0b;
  --local: #0b6bb5; --propagated: #c77700; --shared: #8ab8dd;
  --yes: #e3f4ea; --no: #fcebdf; --open: #eceff2; --shade: #1c212640; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14181c; --sheet: #1d2328; --ink: #e8ecef; --soft: #a5b0b9; --line: #38424a;
  --exact: #737f89; --sketched: #5aaeea; --good: #4fc487; --bad: #f0914f;
  --local: #5aaeea; --propagated: #eaae4b; --shared: #2f6691;
  --yes: #16382a; --no: #43291a; --open: #2a3238; --shade: #000000b0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 0 0 4px; }
p { margin: 0 0 12px; max-width: 75ch; }
code, pre { font: 0.875em/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono",
  monospace; }
code { overflow-wrap: anywhere; }
section, .verdict { background: var(--sheet); border: 1px solid var(--line); border-radius: 10px;
  padding: 20px 24px; margin: 16px 0 0; }
.about { color: var(--soft); margin-bottom: 0; }
.note { color: var(--soft); font-size: 0.875rem; }
.verdict { border-left-width: 6px; }
.verdict strong { display: block; font-size: 1.35rem; line-height: 1.3; margin-bottom: 6px; }
.verdict p:last-child { margin-bottom: 0; }
.verdict.yes { background: var(--yes); border-left-color: var(--good); }
.verdict.no { background: var(--no); border-left-color: var(--bad); }
.verdict.open { background: var(--open); border-left-color: var(--exact); }
.cards { display: grid; gap: 12px; margin-top: 16px;
  grid-template-columns: repeat(auto-fit, minmax(184px, 1fr)); }
.card { background: var(--sheet); border: 1px solid var(--line); border-radius: 10px;
  padding: 14px 18px; }
.card h3 { font-size: 0.875rem; font-weight: 600; color: var(--soft); margin: 0; }
.card .figure { font-size: 1.7rem; line-height: 1.35; font-weight: 650;
  font-variant-numeric: tabular-nums; }
.card p { margin: 0; font-size: 0.875rem; color: var(--soft); }
.pair { display: grid; gap: 28px; grid-template-columns: minmax(0, 2fr) minmax(0, 3fr);
  align-items: start; margin-top: 12px; }
@media (max-width: 860px) { .pair { grid-template-columns: minmax(0, 1fr); gap: 16px; } }
@media (max-width: 520px) { main { padding: 16px 12px 40px; }
  section, .verdict { padding: 16px 14px; } .cards { grid-template-columns: 1fr 1fr; gap: 8px; }
  th, td { padding-left: 10px; } .card { padding: 10px 12px; }
  .card:last-child:nth-child(odd) { grid-column: 1 / -1; }
  .card .figure { font-size: 1.35rem; } }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; list-style: none; margin: 0 0 6px;
  padding: 0; font-size: 0.8125rem; color: var(--soft); }
.legend span { display: inline-block; width: 11px; height: 11px; border-radius: 2px;
  margin-right: 6px; }
.scroll { overflow: auto; max-height: 640px;  /* shadows where there is more to scroll to */
  background: linear-gradient(to right, var(--sheet) 30%, transparent) 0 0,
    linear-gradient(to left, var(--sheet) 30%, transparent) 100% 0,
    linear-gradient(to right, var(--shade), transparent) 0 0,
    linear-gradient(to left, var(--shade), transparent) 100% 0;
  background-repeat: no-repeat; background-size: 40px 100%, 40px 100%, 12px 100%, 12px 100%;
  background-attachment: local, local, scroll, scroll; }
table { border-collapse: collapse; width: 100%; font-size: 0.8125rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 0 5px 14px; border-bottom: 1px solid var(--line);
  white-space: nowrap; vertical-align: top; }
th { color: var(--soft); font-weight: 600; position: sticky; top: 0; background: var(--sheet); }
th:first-child, td:first-child { padding-left: 0; text-align: left; }
.words, .words th { text-align: left; }
td.words { white-space: normal; overflow-wrap: break-word; min-width: 12em; }
.facts th { width: 1%; vertical-align: top; position: static; }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.chart { display: block; overflow: visible; }
.chart text { fill: var(--ink); font-size: 12.5px; paint-order: stroke;
  stroke: var(--sheet); stroke-width: 4px; }
.chart .tick { fill: var(--soft); font-size: 11.5px; }
.chart .value { font-variant-numeric: tabular-nums; }
.chart .grid { stroke: var(--line); stroke-width: 1; }
.chart .mark { stroke: var(--ink); stroke-width: 1.25; stroke-dasharray: 3 3; }
.chart .whisker { stroke: var(--ink); stroke-width: 1.5; }
.exact { fill: var(--exact); background: var(--exact); }
.sketched { fill: var(--sketched); background: var(--sketched); }
.good { fill: var(--good); background: var(--good); }
.bad { fill: var(--bad); background: var(--bad); }
.local { fill: var(--local); background: var(--local); }
.propagated { fill: var(--propagated); background: var(--propagated); }
.shared { fill: var(--shared); background: var(--shared); }
details { margin-top: 12px; }
summary { cursor: pointer; font-weight: 600; }
pre { overflow: auto; max-height: 480px; background: var(--page); border: 1px solid var(--line);
  border-radius: 6px; padding: 12px; }
dl { margin: 12px 0 0; display: grid; gap: 4px 20px; grid-template-columns: max-content 1fr; }
dt { font-weight: 600; } dd { margin: 0; max-width: 70ch; }
@media (max-width: 520px) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 8px; } }
footer { color: var(--soft); font-size: 0.8125rem; margin-top: 20px; }
@media print { body { background: none; } section, .card, .verdict { break-inside: avoid; }
  .scroll { max-height: none; overflow: visible; } }
"""
