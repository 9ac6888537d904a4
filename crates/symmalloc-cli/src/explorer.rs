//! The explorer: the part of a report's page in which a reader zooms into a job and compares its layouts.
//!
//! ```text
//!                         ┌─► Layout   recorded      placements of the recording, if it has any
//! Recorded ──► layouts ───┼─► Layout   PyTorch       its model
//!                         ├─► Layout   symmalloc     the job's own settings
//!                         └─► Layout   planned       following a plan, if there is one
//!                                │
//! program, names, stacks, layouts ──► columns ──► deflate ──► base64 ──► <script type="application/base64">
//!                                                                          │
//!                               data.js decodes it, view.js draws it ◄─────┘
//! ```
//!
//! The page needs no network. Its content security policy allows only the page's own script, by its hash, so text from a recording cannot
//! run as a script. In a browser without scripts, the section stays hidden and the page shows its static pictures.

mod columns;
mod layout;
mod layouts;

pub(crate) use layout::Layout;
pub(crate) use layouts::layouts;

use crate::quantity::count;
use crate::recorded::Recorded;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use maud::{Markup, PreEscaped, html};
use sha2::{Digest, Sha256};

/// The script: first the decoder, then the view.
const SCRIPT: &str = concat!(include_str!("explorer/data.js"), include_str!("explorer/view.js"));

/// Style of the section.
pub(crate) const STYLE: &str = include_str!("explorer/style.css");

/// Returns the content security policy of a page with the explorer. It allows the explorer's script and inline styles.
pub(crate) fn content_security_policy() -> String {
    let hash = STANDARD.encode(Sha256::digest(SCRIPT));
    format!(
        "default-src 'none'; script-src 'sha256-{hash}'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    )
}

/// Returns the section, its data and its script. The cursor stands at `op` at first.
pub(crate) fn section(recorded: &Recorded, layouts: &[Layout], op: usize) -> Markup {
    let program = recorded.program();
    let stacks = recorded.recording.stacks.as_ref();
    let data = STANDARD.encode(columns::compressed(program, stacks, layouts, op));
    html! {
        section #explorer hidden aria-label="Memory over time, interactive" {
            div.bar {
                label { "Layout " select #layout {} }
                label { "Compare with " select #compare {} }
                label { "Color by " select #color {} }
                label { "Filter " input #filter type="search" placeholder="part of a name" autocomplete="off" spellcheck="false"; }
                output #matches {}
            }
            div #legend {}
            canvas #overview tabindex="0" role="application" aria-label="Reserved and live memory over the whole job. Click or drag to center the view." {}
            div.bar {
                span.buttons {
                    button #nearer type="button" aria-label="Zoom in" { "+" }
                    button #farther type="button" aria-label="Zoom out" { "−" }
                    button #taller type="button" aria-label="Zoom into addresses" { "↕ +" }
                    button #flatter type="button" aria-label="Zoom out of addresses" { "↕ −" }
                    button #whole type="button" { "Whole job" }
                }
                output #range aria-live="off" {}
                label {
                    "Cursor after op "
                    input #op type="number" min="0" max=(program.ops().len().saturating_sub(1)) step="1";
                }
            }
            div #stage {
                canvas #lanes tabindex="0" role="application" aria-label="Blocks over time, one lane for each pool and stream. Arrow keys move, plus and minus zoom into ops, brackets into addresses, 0 shows the whole job, comma and period move the cursor." {}
                div #hint hidden {}
            }
            p.aside {
                "Each rectangle is an allocation: ops from left to right, addresses from bottom to top, reserved memory behind it. \
                 Scroll to zoom into ops, with Shift into addresses; drag to move; click an allocation for its details."
            }
            div #details {
                div { h3 { "Selected allocation" } div #selected { "Click an allocation." } }
                div { h3 #live_title {} div #live {} }
            }
        }
        script #recording type="application/base64" { (PreEscaped(data)) }
        script { (PreEscaped(SCRIPT)) }
    }
}

/// Returns the sentence that the page shows in a browser without scripts.
pub(crate) fn without_scripts(ops: usize) -> Markup {
    html! {
        noscript { p.aside { "With scripts, this page lets you zoom into the " (count(ops)) " ops. It fetches nothing." } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_cannot_end_its_element() {
        assert!(!SCRIPT.contains("</") && !SCRIPT.contains("<!--"), "an HTML parser would end the script early");
        assert!(!STYLE.contains('<'));
    }
}
