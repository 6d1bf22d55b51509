//! Label selectors as Kubernetes and kubectl have them, such as `tier=db,env in (prod,test),!retired`. Pure.
//!
//! A selector is parsed from text and written in the form that the API server takes. To add an operator: its
//! variant of `Test`, and its arms in `Requirement::matches`, `Reader::test` and `Display` of `Requirement`.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use super::{Labels, check_any_value, check_key};

/// Symbols of the syntax. One that begins with another comes before it.
const SYMBOLS: [&str; 9] = ["==", "!=", "=", "!", "(", ")", ",", "<", ">"];
/// Characters between words; the API server takes no others.
const SPACES: [char; 4] = [' ', '\t', '\r', '\n'];

/// Requirements on the labels of an object, all of which have to be met. An empty selector matches every object.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selector(Vec<Requirement>);

/// Requirement on the label with one key.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Requirement {
    key: String,
    test: Test,
}

/// Condition that a label has to meet. The sets of values are never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Test {
    /// The object has the label.
    Exists,
    /// The object does not have the label.
    Absent,
    /// The object has the label with one of these values.
    In(BTreeSet<String>),
    /// The object has the label with none of these values, or does not have it.
    NotIn(BTreeSet<String>),
}

/// Reason why a text is not a selector, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("at character {place}: {problem}")]
pub struct Invalid {
    /// Number of the character, from 1.
    place: usize,
    problem: String,
}

impl Selector {
    /// Returns whether the selector has no requirement.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether an object with these labels meets all requirements.
    pub fn matches(&self, labels: &Labels) -> bool {
        self.0.iter().all(|requirement| requirement.matches(labels))
    }
}

impl Requirement {
    fn matches(&self, labels: &Labels) -> bool {
        let value = labels.get(&self.key);
        match &self.test {
            Test::Exists => value.is_some(),
            Test::Absent => value.is_none(),
            Test::In(values) => value.is_some_and(|value| values.contains(value)),
            Test::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, requirement) in self.0.iter().enumerate() {
            if number > 0 {
                formatter.write_str(",")?;
            }
            write!(formatter, "{requirement}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = &self.key;
        let list =
            |values: &BTreeSet<String>| values.iter().map(String::as_str).collect::<Vec<_>>().join(",");
        match &self.test {
            Test::Exists => write!(formatter, "{key}"),
            Test::Absent => write!(formatter, "!{key}"),
            Test::In(values) if values.len() == 1 => write!(formatter, "{key}={}", list(values)),
            Test::In(values) => write!(formatter, "{key} in ({})", list(values)),
            Test::NotIn(values) if values.len() == 1 => write!(formatter, "{key}!={}", list(values)),
            Test::NotIn(values) => write!(formatter, "{key} notin ({})", list(values)),
        }
    }
}

impl FromStr for Selector {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let mut reader = Reader { text, at: 0 };
        let mut requirements = Vec::new();
        if reader.peek().0 == Token::End {
            return Ok(Self(requirements));
        }
        loop {
            requirements.push(reader.requirement()?);
            match reader.take() {
                (Token::End, _) => return Ok(Self(requirements)),
                (Token::Symbol(","), _) => {}
                (token, at) => {
                    return Err(reader.wrong(at, format!("expected a comma or the end, but found {token}")));
                }
            }
        }
    }
}

/// Smallest unit of a selector's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token<'t> {
    /// Key, value, or one of the operators `in` and `notin`: these are valid keys and values, too.
    Word(&'t str),
    /// One of `SYMBOLS`.
    Symbol(&'static str),
    /// No further tokens follow.
    End,
}

impl fmt::Display for Token<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Word(text) | Self::Symbol(text) => write!(formatter, "{text:?}"),
            Self::End => formatter.write_str("the end"),
        }
    }
}

/// Position in the text of a selector.
#[derive(Debug)]
struct Reader<'t> {
    text: &'t str,
    /// Offset of the next token, or of the spaces before it.
    at: usize,
}

impl<'t> Reader<'t> {
    /// Returns the next token and its offset.
    fn peek(&self) -> (Token<'t>, usize) {
        let rest = self.text[self.at..].trim_start_matches(SPACES);
        let at = self.text.len() - rest.len();
        if rest.is_empty() {
            return (Token::End, at);
        }
        if let Some(symbol) = SYMBOLS.into_iter().find(|symbol| rest.starts_with(symbol)) {
            return (Token::Symbol(symbol), at);
        }
        let ends = |character: char| SPACES.contains(&character) || "=!(),<>".contains(character);
        let end = rest.find(ends).unwrap_or(rest.len());
        (Token::Word(&rest[..end]), at)
    }

    /// Returns the next token and its offset, and proceeds beyond it.
    fn take(&mut self) -> (Token<'t>, usize) {
        let (token, at) = self.peek();
        let length = match token {
            Token::Word(text) | Token::Symbol(text) => text.len(),
            Token::End => 0,
        };
        self.at = at + length;
        (token, at)
    }

    fn requirement(&mut self) -> Result<Requirement, Invalid> {
        let is_negated = self.peek().0 == Token::Symbol("!");
        if is_negated {
            self.take();
        }
        let key = self.key()?;
        let test = if is_negated { Test::Absent } else { self.test(&key)? };
        Ok(Requirement { key, test })
    }

    fn key(&mut self) -> Result<String, Invalid> {
        match self.take() {
            (Token::Word(key), at) => {
                check_key(key)
                    .map_err(|why| self.wrong(at, format!("{key:?} is not the key of a label: {why}")))?;
                Ok(key.to_owned())
            }
            (token, at) => Err(self.wrong(at, format!("expected the key of a label, but found {token}"))),
        }
    }

    /// Reads what follows the key of a requirement without `!`.
    fn test(&mut self, key: &str) -> Result<Test, Invalid> {
        if matches!(self.peek().0, Token::End | Token::Symbol(",")) {
            return Ok(Test::Exists);
        }
        match self.take() {
            (Token::Symbol("=" | "=="), _) => Ok(Test::In(BTreeSet::from([self.value()?]))),
            (Token::Symbol("!="), _) => Ok(Test::NotIn(BTreeSet::from([self.value()?]))),
            (Token::Word("in"), _) => Ok(Test::In(self.values()?)),
            (Token::Word("notin"), _) => Ok(Test::NotIn(self.values()?)),
            (token, at) => {
                let problem = format!(
                    "expected =, ==, !=, in, notin, a comma or the end after the key {key:?}, but found {token}"
                );
                Err(self.wrong(at, problem))
            }
        }
    }

    /// Reads a value, which is empty where no word follows.
    fn value(&mut self) -> Result<String, Invalid> {
        match self.peek() {
            (Token::End | Token::Symbol("," | ")"), _) => Ok(String::new()),
            (Token::Word(value), at) => {
                self.take();
                check_any_value(value)
                    .map_err(|why| self.wrong(at, format!("{value:?} is not the value of a label: {why}")))?;
                Ok(value.to_owned())
            }
            (token, at) => Err(self.wrong(at, format!("expected the value of a label, but found {token}"))),
        }
    }

    /// Reads the values in parentheses after `in` or `notin`.
    fn values(&mut self) -> Result<BTreeSet<String>, Invalid> {
        let (token, at) = self.take();
        if token != Token::Symbol("(") {
            return Err(
                self.wrong(at, format!("expected values in parentheses, as in (x,y), but found {token}"))
            );
        }
        if let (Token::Symbol(")"), at) = self.peek() {
            return Err(self.wrong(at, "there is no value in the parentheses".to_owned()));
        }
        let mut values = BTreeSet::new();
        loop {
            values.insert(self.value()?);
            match self.take() {
                (Token::Symbol(")"), _) => return Ok(values),
                (Token::Symbol(","), _) => {}
                (token, at) => {
                    return Err(self.wrong(at, format!("expected a comma or ), but found {token}")));
                }
            }
        }
    }

    fn wrong(&self, at: usize, problem: String) -> Invalid {
        Invalid { place: self.text[..at].chars().count() + 1, problem }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::{btree_map, btree_set, vec};
    use proptest::prelude::*;

    use super::*;

    fn labels(of: &[(&str, &str)]) -> Labels {
        of.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn parsed(text: &str) -> Selector {
        text.parse().unwrap_or_else(|error| panic!("{text:?}: {error}"))
    }

    /// The selectors are those of the documentation of Kubernetes and of `kubectl get --help`, and the valid ones of
    /// the API server's own tests.
    #[test]
    fn selectors_of_kubernetes_select_what_they_do_there() {
        let production = labels(&[("environment", "production"), ("tier", "frontend"), ("x", "")]);
        let staging =
            labels(&[("environment", "qa"), ("tier", "backend"), ("partition", "customerA"), ("x", "a")]);
        let bare = Labels::new();
        for (text, written, expected) in [
            ("", "", [true, true, true]),
            (" ", "", [true, true, true]),
            ("environment = production", "environment=production", [true, false, false]),
            ("tier != frontend", "tier!=frontend", [false, true, true]),
            ("environment==production,tier!=frontend", "environment=production,tier!=frontend", [false; 3]),
            ("environment in (production, qa)", "environment in (production,qa)", [true, true, false]),
            ("tier notin (frontend, backend)", "tier notin (backend,frontend)", [false, false, true]),
            ("partition", "partition", [false, true, false]),
            ("!partition", "!partition", [true, false, true]),
            ("partition,environment notin (qa)", "partition,environment!=qa", [false, false, false]),
            (
                "environment,environment notin (frontend)",
                "environment,environment!=frontend",
                [true, true, false],
            ),
            (
                "environment in (production),tier in (frontend)",
                "environment=production,tier=frontend",
                [true, false, false],
            ),
            (
                "partition in (customerA, customerB),environment!=qa",
                "partition in (customerA,customerB),environment!=qa",
                [false; 3],
            ),
            ("x=", "x=", [true, false, false]),
            ("x= ,tier= frontend ", "x=,tier=frontend", [true, false, false]),
            ("x!=", "x!=", [false, true, true]),
            ("x in (,a)", "x in (,a)", [true, true, false]),
            ("x in (a,,)", "x in (,a)", [true, true, false]),
            ("x notin (,)", "x!=", [false, true, true]),
            ("\n! x\t", "!x", [false, false, true]),
            // The operators are words as any others.
            ("in in (in)", "in=in", [false; 3]),
            ("!notin", "!notin", [true; 3]),
            ("x in(a)", "x=a", [false, true, false]),
        ] {
            let selector = parsed(text);
            assert_eq!(selector.to_string(), written, "{text:?}");
            let matches = [&production, &staging, &bare].map(|labels| selector.matches(labels));
            assert_eq!(matches, expected, "{text:?}");
        }
    }

    #[test]
    fn what_is_wrong_is_told_with_its_place() {
        let long = format!("a={}", "v".repeat(64));
        for (text, expected) in [
            (",", "at character 1: expected the key of a label, but found \",\""),
            ("a,", "at character 3: expected the key of a label, but found the end"),
            ("a=1, ,b", "at character 6: expected the key of a label, but found \",\""),
            ("!", "at character 2: expected the key of a label, but found the end"),
            ("=b", "at character 1: expected the key of a label, but found \"=\""),
            (
                "a b",
                "at character 3: expected =, ==, !=, in, notin, a comma or the end after the key \"a\", but found \"b\"",
            ),
            (
                "x>1",
                "at character 2: expected =, ==, !=, in, notin, a comma or the end after the key \"x\", but found \">\"",
            ),
            ("!x=a", "at character 3: expected a comma or the end, but found \"=\""),
            ("x==a==b", "at character 5: expected a comma or the end, but found \"==\""),
            ("a=b c", "at character 5: expected a comma or the end, but found \"c\""),
            ("a===b", "at character 4: expected the value of a label, but found \"=\""),
            ("a=!b", "at character 3: expected the value of a label, but found \"!\""),
            ("a=)", "at character 3: expected a comma or the end, but found \")\""),
            ("a in b", "at character 6: expected values in parentheses, as in (x,y), but found \"b\""),
            ("a in", "at character 5: expected values in parentheses, as in (x,y), but found the end"),
            ("a notin ( )", "at character 11: there is no value in the parentheses"),
            ("a in (x", "at character 8: expected a comma or ), but found the end"),
            ("a in (x y)", "at character 9: expected a comma or ), but found \"y\""),
            (
                "ü=b",
                "at character 1: \"ü\" is not the key of a label: the name of a label's key may have up to 63",
            ),
            (
                "A.b/c",
                "at character 1: \"A.b/c\" is not the key of a label: the part of a label's key before the /",
            ),
            ("a=b,c=ü", "at character 7: \"ü\" is not the value of a label: a label may have letters"),
            ("x=a||y=b", "at character 3: \"a||y\" is not the value of a label: a label may have letters"),
            (long.as_str(), "is not the value of a label: it has 64 bytes"),
        ] {
            let told = text.parse::<Selector>().unwrap_err().to_string();
            assert!(told.contains(expected), "{text:?}: {told}");
        }
    }

    fn name() -> impl Strategy<Value = String> {
        "[A-Za-z0-9]([-A-Za-z0-9_.]{0,8}[A-Za-z0-9])?|in|notin"
    }

    fn key() -> impl Strategy<Value = String> {
        let prefix = "([a-z0-9]([-a-z0-9]{0,4}[a-z0-9])?\\.){0,2}[a-z]{1,4}/";
        (proptest::option::of(prefix), name()).prop_map(|(prefix, name)| prefix.unwrap_or_default() + &name)
    }

    fn value() -> impl Strategy<Value = String> {
        prop_oneof![Just(String::new()), name()]
    }

    fn selector() -> impl Strategy<Value = Selector> {
        let test = prop_oneof![
            Just(Test::Exists),
            Just(Test::Absent),
            btree_set(value(), 1..4).prop_map(Test::In),
            btree_set(value(), 1..4).prop_map(Test::NotIn),
        ];
        let requirement = (key(), test).prop_map(|(key, test)| Requirement { key, test });
        vec(requirement, 0..5).prop_map(Selector)
    }

    proptest! {
        #[test]
        fn what_is_written_is_parsed_as_the_same(selector in selector()) {
            let parsed = selector.to_string().parse::<Selector>();
            prop_assert_eq!(parsed, Ok(selector));
        }

        /// What a selector is sent as to the API server means what was typed.
        #[test]
        fn what_is_parsed_is_written_as_the_same(text in "([ab]|in|notin|[=!(),<> \\t]){0,12}") {
            match text.parse::<Selector>() {
                Ok(selector) => {
                    let written = selector.to_string();
                    prop_assert_eq!(written.parse::<Selector>(), Ok(selector));
                    prop_assert_eq!(parsed(&written).to_string(), written);
                }
                Err(Invalid { place, .. }) => prop_assert!((1..=text.chars().count() + 1).contains(&place)),
            }
        }

        #[test]
        fn any_text_is_a_selector_or_refused(text in any::<String>()) {
            if let Err(Invalid { place, .. }) = text.parse::<Selector>() {
                prop_assert!((1..=text.chars().count() + 1).contains(&place));
            }
        }

        #[test]
        fn an_operator_and_its_negation_divide_all_objects(
            key in "[ab]",
            values in btree_set("[xy]?", 1..3),
            labels in btree_map("[ab]", "[xyz]?", 0..3),
        ) {
            let matches = |test| Selector(vec![Requirement { key: key.clone(), test }]).matches(&labels);
            prop_assert_ne!(matches(Test::In(values.clone())), matches(Test::NotIn(values.clone())));
            prop_assert_ne!(matches(Test::Exists), matches(Test::Absent));
        }
    }
}
