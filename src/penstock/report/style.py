"""How a report looks: light and dark by the reader's own choice, and on paper. Nothing from elsewhere.

In:  nothing.
Out: ``STYLE``; ``POLICY``: what the file may do, which is to be styled by exactly that.
Runs in: command line; pure.
"""

from __future__ import annotations

import base64
import hashlib

STYLE = """
:root{color-scheme:light dark;--ground:#fff;--raised:#f6f7f9;--ink:#1b1f24;--soft:#57606a;--rule:#d8dee4;
--arena:#0072b2;--workers:#56a8dc;--cache:#12876a;--trainer:#d99100;--other:#a4abb3;--used:#1b1f24;--limit:#b3261e;
--budget:#8a4b00;--speed:#0072b2;--waiting:#b45309;--gpu0:#0072b2;--gpu1:#b45309;--gpu2:#12876a;--gpu3:#8b3f9e;
--hurts:#b3261e;--warning:#8a5300;--info:#0a5c9e;--good:#0f6b4f;--mark:#57606a}
@media (prefers-color-scheme:dark){:root{--ground:#14171b;--raised:#1d2127;--ink:#e6e9ee;--soft:#a3acb8;--rule:#343b45;
--arena:#3d9bdc;--workers:#8fcbf2;--cache:#34b592;--trainer:#e8ac3d;--other:#7d8691;--used:#e6e9ee;--limit:#ff8a80;
--budget:#f0b35b;--speed:#5cb3ee;--waiting:#f0a35b;--gpu0:#5cb3ee;--gpu1:#f0a35b;--gpu2:#4cc9a5;--gpu3:#d08ce3;
--hurts:#ff8a80;--warning:#f0b35b;--info:#7cc0f5;--good:#58cfab;--mark:#a3acb8}}
*{box-sizing:border-box}
html{background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
body{max-width:980px;margin:0 auto;padding:24px 20px 48px;overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.25;margin:0 0 4px}
h2{font-size:1.1rem;margin:36px 0 10px;padding-bottom:4px;border-bottom:1px solid var(--rule)}
h3{font-size:1rem;margin:0}
p{margin:0 0 8px}
.about{color:var(--soft);font-size:.9rem}
.state{display:inline-block;padding:0 8px;border:1px solid currentColor;border-radius:10px;font-size:.8rem;
margin-right:8px;color:var(--info)}
.state.finished{color:var(--good)}.state.failed,.state.killed{color:var(--hurts)}
.headline{font-size:1.1rem;margin:18px 0 16px;padding:12px 16px;background:var(--raised);
border-left:4px solid var(--info)}
.headline.loading{border-color:var(--warning)}.headline.gpu,.headline.neither{border-color:var(--good)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(138px,1fr));gap:10px;margin:0}
.tiles div{background:var(--raised);padding:10px 12px;border-radius:6px}
.tiles dt{color:var(--soft);font-size:.8rem}
.tiles dd{margin:0;font-size:1.25rem;font-variant-numeric:tabular-nums}
.tiles dd span{display:block;font-size:.78rem;color:var(--soft)}
.findings{list-style:none;margin:0;padding:0}
.findings li{padding:10px 0 10px 14px;border-left:3px solid var(--rule);margin-bottom:8px}
.findings p{margin:2px 0 0}
.findings .hurts{border-color:var(--hurts)}.findings .warning{border-color:var(--warning)}
.findings .info{border-color:var(--info)}.findings .good{border-color:var(--good)}
.severity{font-size:.75rem;font-weight:600;margin-left:8px}
.hurts .severity{color:var(--hurts)}.warning .severity{color:var(--warning)}
.info .severity{color:var(--info)}.good .severity{color:var(--good)}
.fix b{font-weight:600}
figure{margin:0 0 30px;break-inside:avoid}
figcaption{font-size:.88rem;color:var(--soft)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;margin:2px 0 4px;padding:0;font-size:.84rem}
.legend svg{width:18px;height:10px;margin-right:6px;vertical-align:0}
.wide{overflow-x:auto}
:focus-visible{outline:2px solid var(--info);outline-offset:2px}
.chart{display:block;width:100%;min-width:620px;height:auto;margin-top:4px}
.chart text{fill:var(--soft);font-size:12px;font-variant-numeric:tabular-nums}
.grid{stroke:var(--rule);stroke-width:1;fill:none}
.area{stroke:none;fill-opacity:.85}
.line{fill:none;stroke-width:1.6;stroke-linejoin:round;stroke-linecap:round}
.area.arena{fill:var(--arena)}.area.workers{fill:var(--workers)}.area.cache{fill:var(--cache)}
.area.trainer{fill:var(--trainer)}.area.other{fill:var(--other)}
.line.used{stroke:var(--used);stroke-width:1.2;stroke-dasharray:1 3}
.line.tree,.line.speed,.line.speed0{stroke:var(--speed)}
.line.speed1{stroke:var(--waiting)}.line.speed2{stroke:var(--cache)}.line.speed3{stroke:var(--gpu3)}
.line.waiting{stroke:var(--waiting)}.line.hits{stroke:var(--cache)}
.line.gpu0{stroke:var(--gpu0)}.line.gpu1{stroke:var(--gpu1)}.line.gpu2{stroke:var(--gpu2)}.line.gpu3{stroke:var(--gpu3)}
.line.reserved{stroke:var(--trainer)}
.line.limit{stroke:var(--limit);stroke-dasharray:8 4}.line.budget{stroke:var(--budget);stroke-dasharray:3 3}
.marks path{stroke:var(--mark);stroke-width:1;stroke-dasharray:2 3;fill:none}
.marks .alert path{stroke:var(--hurts)}
.marks text{font-size:11px}.marks .alert text{fill:var(--hurts);font-weight:600}
table{border-collapse:collapse;width:100%;font-size:.88rem;margin:0 0 8px}
caption{text-align:left;color:var(--soft);font-size:.84rem;padding-bottom:4px}
th,td{text-align:left;vertical-align:top;padding:4px 12px 4px 0;border-bottom:1px solid var(--rule);font-weight:400}
thead th{color:var(--soft);font-size:.8rem;vertical-align:bottom}
.number{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
td:not(.number),tbody th:not(.number){min-width:7.5em}
.facts th{color:var(--soft)}.facts td{width:85%}
td code,p code{font:.86rem ui-monospace,SFMono-Regular,Menlo,monospace}
details{margin-top:4px;font-size:.88rem}
summary{cursor:pointer;color:var(--info);width:max-content}
footer{margin-top:40px;color:var(--soft);font-size:.82rem}
@media (max-width:520px){body{padding:16px 12px 32px}.tiles{grid-template-columns:1fr 1fr}}
@media print{:root{color-scheme:light}html{font-size:11px}body{max-width:none;padding:0}
details:not([open]){display:none}
.wide{overflow:visible}.chart{min-width:0}h2{break-after:avoid}.findings li{break-inside:avoid}}
"""

_DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'"
