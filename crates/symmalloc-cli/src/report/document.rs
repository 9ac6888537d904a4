//! The HTML document around a report: one file that fetches nothing. It shows wide pictures on screens and paper, and narrow ones on
//! phones.

use crate::explorer;
use maud::{DOCTYPE, Markup, PreEscaped, html};
use symmalloc_text::visible;

const STYLE: &str = "\
:root{color-scheme:light dark;--paper:#fff;--text:#000;--faint:#444;--rule:#bbb}\
body{margin:0 auto;padding:16px;max-width:880px;background:var(--paper);color:var(--text);\
font:16px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}\
h1{font-size:1.5rem;line-height:1.25;margin:.5rem 0;overflow-wrap:anywhere}h2{font-size:1.2rem;margin:2rem 0 .5rem}\
figure{margin:1.5rem 0;break-inside:avoid}svg{display:block;max-width:100%;height:auto}svg.narrow{display:none}\
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.35rem .75rem .35rem 0;\
border-bottom:1px solid var(--rule);vertical-align:top}td.n,th.n{text-align:right;white-space:nowrap}\
code{font:13px/1.4 ui-monospace,'SF Mono',Consolas,'DejaVu Sans Mono',monospace;overflow-wrap:anywhere}\
.aside{color:var(--faint);font-size:.875rem}.figures{display:flex;flex-wrap:wrap;gap:.5rem 2.5rem;margin:1rem 0}\
.figures div{min-width:8rem}.figures b{display:block;font-size:1.5rem;line-height:1.2}\
@media screen and (max-width:899px){body{padding:12px;max-width:600px}\
svg.wide{display:none}svg.narrow{display:block;margin:0 auto}\
.stacked thead{display:none}.stacked tr{display:block;border-bottom:1px solid var(--rule);padding:.4rem 0}\
.stacked td{display:block;border:0;padding:.05rem 0;text-align:left}\
.stacked td[data-of]{display:inline-block;margin-right:1rem}\
.stacked td[data-of]::before{content:attr(data-of) ' ';color:var(--faint)}}\
@media screen and (prefers-color-scheme:dark){:root{--paper:#16181c;--text:#f0f0f0;--faint:#b4b4b4;--rule:#4a4d52}}\
@page{margin:12mm}@media print{:root{color-scheme:light}html{font-size:11px}body{padding:0;max-width:none;font-size:12px}\
code{font-size:11px}figure{margin:.5rem 0}svg{max-height:20cm}h2{margin:1rem 0 .3rem;break-after:avoid}\
tr{break-inside:avoid}th,td{padding:.2rem .5rem .2rem 0}}";

/// Returns a document with a title and a body. Hidden characters are escaped.
pub(super) fn html(title: &str, body: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta http-equiv="Content-Security-Policy" content=(explorer::content_security_policy());
                meta name="viewport" content="width=device-width,initial-scale=1";
                title { (title) }
                style { (PreEscaped(STYLE)) (PreEscaped(explorer::STYLE)) }
            }
            body { (body) }
        }
    };
    // The page's own markup has no hidden characters, so only foreign text changes.
    visible(&page.into_string()).into_owned()
}
