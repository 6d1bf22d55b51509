//! The comments of a proto file, as Markdown.

use std::collections::BTreeMap;

use prost_types::FileDescriptorProto;

/// Of one file, by the places of what they are about: see `SourceCodeInfo.Location.path`.
pub struct Comments(BTreeMap<Vec<i32>, Comment>);

#[derive(Default)]
struct Comment {
    /// Before it, with an empty line between: about this one and those after it.
    apart: Vec<String>,
    own: String,
}

impl Comments {
    pub fn of(file: &FileDescriptorProto) -> Self {
        let info = file.source_code_info.as_ref().expect("protos are compiled with their comments");
        let found = info.location.iter().map(|one| {
            let comment = Comment {
                apart: one.leading_detached_comments.clone(),
                own: format!("{}{}", one.leading_comments(), one.trailing_comments()),
            };
            (one.path.clone(), comment)
        });
        Self(found.collect())
    }

    /// Paragraphs about what is at this place.
    pub fn paragraphs(&self, path: &[i32]) -> Vec<String> {
        self.0.get(path).map_or_else(Vec::new, |comment| paragraphs(&comment.own))
    }

    /// Paragraphs about what comes from this place on.
    pub fn before(&self, path: &[i32]) -> Vec<String> {
        let apart = self.0.get(path).map_or(&[][..], |comment| &comment.apart);
        apart.iter().flat_map(|text| paragraphs(text)).collect()
    }

    /// All of it in one line, for a table.
    pub fn cell(&self, path: &[i32]) -> String {
        self.paragraphs(path).join(" ").replace('|', "\\|")
    }
}

fn paragraphs(text: &str) -> Vec<String> {
    let mut found = vec![String::new()];
    for line in text.lines().map(str::trim) {
        match found.last_mut() {
            Some(last) if !line.is_empty() => {
                if !last.is_empty() {
                    last.push(' ');
                }
                last.push_str(line);
            }
            _ => found.push(String::new()),
        }
    }
    found.retain(|paragraph| !paragraph.is_empty());
    found.iter().map(|paragraph| escaped(paragraph)).collect()
}

/// What Markdown would take for something else, outside of code.
fn escaped(text: &str) -> String {
    let mut is_code = false;
    let mut found = String::with_capacity(text.len());
    for character in text.chars() {
        is_code ^= character == '`';
        match character {
            '<' if !is_code => found.push_str("&lt;"),
            '*' | '[' if !is_code => found.extend(['\\', character]),
            _ => found.push(character),
        }
    }
    found
}

#[test]
fn a_comment_becomes_paragraphs_that_markdown_shows_as_they_are() {
    let text = " One `a<b` <c>\n goes on.\n\n Two * [three]\n";
    assert_eq!(paragraphs(text), ["One `a<b` &lt;c> goes on.", "Two \\* \\[three]"]);
    assert!(paragraphs("\n \n").is_empty());
}
