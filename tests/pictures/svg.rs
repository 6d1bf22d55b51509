//! A terminal as an SVG that needs no font but any of fixed width, and has its own background: it is read on light and dark pages.

use std::fmt::Write as _;

use crate::terminal::{Style, Terminal};

/// Of a character, in pixels.
const WIDTH: f32 = 8.0;
const HEIGHT: f32 = 17.0;
const MARGIN: f32 = 14.0;
/// Of the bar with the title.
const BAR: f32 = 28.0;
const BACKGROUND: &str = "#1b1f27";
const FOREGROUND: &str = "#d7dae0";
/// Of the colours that programs use, on that background.
const COLOURS: [&str; 8] =
    ["#5c6370", "#ff6b74", "#8fce7a", "#e5c07b", "#6cb6ff", "#d48be8", "#5fc9d6", "#d7dae0"];

/// The picture; `title` is in its bar.
#[allow(clippy::cast_precision_loss, reason = "numbers of rows and columns")]
pub fn picture(title: &str, terminal: &Terminal) -> String {
    let width = terminal.columns as f32 * WIDTH + 2.0 * MARGIN;
    let height = terminal.rows.len() as f32 * HEIGHT + BAR + MARGIN;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         role=\"img\">\n<title>{0}</title>\n<style>text{{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans \
         Mono',monospace;fill:{FOREGROUND};white-space:pre}}</style>\n<rect width=\"{width}\" height=\"{height}\" rx=\"8\" \
         fill=\"{BACKGROUND}\"/>\n<text x=\"{1}\" y=\"19\" text-anchor=\"middle\" opacity=\".6\">{0}</text>\n",
        escaped(title),
        width / 2.0,
    );
    for (number, row) in terminal.rows.iter().enumerate() {
        let top = BAR + number as f32 * HEIGHT;
        let mut column = 0;
        for run in row.chunk_by(|one, other| one.1 == other.1) {
            let x = MARGIN + column as f32 * WIDTH;
            let style = run[0].1;
            if style.reverse {
                let long = run.len() as f32 * WIDTH;
                let _ = writeln!(
                    svg,
                    "<rect x=\"{x}\" y=\"{top}\" width=\"{long}\" height=\"{HEIGHT}\" fill=\"{FOREGROUND}\"/>"
                );
            }
            words(&mut svg, run, column, top);
            column += run.len();
        }
    }
    svg + "</svg>\n"
}

/// The parts of a run between gaps, each as long as its characters are wide, whatever the font.
#[allow(clippy::cast_precision_loss, reason = "numbers of rows and columns")]
fn words(svg: &mut String, run: &[(char, Style)], column: usize, top: f32) {
    let text: String = run.iter().map(|(character, _)| character).collect();
    let mut at = column;
    for part in text.split("  ") {
        let shown = part.trim();
        if !shown.is_empty() {
            let before = part.chars().count() - part.trim_start().chars().count();
            let x = MARGIN + (at + before) as f32 * WIDTH;
            let long = shown.chars().count() as f32 * WIDTH;
            let y = top + 13.0;
            let _ = writeln!(
                svg,
                "<text x=\"{x}\" y=\"{y}\" textLength=\"{long}\"{}>{}</text>",
                attributes(run[0].1),
                escaped(shown)
            );
        }
        at += part.chars().count() + 2;
    }
}

fn attributes(style: Style) -> String {
    let mut attributes = String::new();
    let colour = style.colour.map(|colour| COLOURS[usize::from(colour)]);
    if let Some(colour) = colour.or(style.reverse.then_some(BACKGROUND)) {
        let _ = write!(attributes, " style=\"fill:{colour}\"");
    }
    if style.bold {
        attributes += " font-weight=\"bold\"";
    }
    if style.dim {
        attributes += " opacity=\".6\"";
    }
    attributes
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
