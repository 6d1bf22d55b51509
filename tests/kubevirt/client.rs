//! The API server as programs ask it that must live with every answer, and with none.

use std::io;
use std::pin::Pin;

use http::{Method, StatusCode};
use hyper::body::Body as _;
use serde_json::Value;

use crate::api::{Answer, Api};

pub const JSON: &str = "application/json";
pub const MERGE: &str = "application/merge-patch+json";
pub const JSON_PATCH: &str = "application/json-patch+json";

/// Asks once; what came back, whatever it is.
pub async fn call(
    api: &Api,
    method: Method,
    path: &str,
    kind: &str,
    body: Option<&Value>,
) -> io::Result<(StatusCode, Value)> {
    let body = body.map(Value::to_string).unwrap_or_default();
    let (status, bytes) = api.send(method, path, body, kind).await?;
    // What is not JSON is told as it is.
    let value = serde_json::from_slice(&bytes)
        .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&bytes).into_owned()));
    Ok((status, value))
}

/// The objects of a path, with the version of the list.
pub async fn list(api: &Api, path: &str) -> io::Result<(Vec<Value>, String)> {
    let (status, mut answer) = call(api, Method::GET, path, JSON, None).await?;
    if !status.is_success() {
        return Err(io::Error::other(format!("{path}: {status}: {answer}")));
    }
    let version = answer["metadata"]["resourceVersion"].as_str().unwrap_or_default().to_owned();
    Ok((serde_json::from_value(answer["items"].take()).unwrap_or_default(), version))
}

/// What changes among the objects of a path, from a version on.
pub struct Watch {
    answer: Answer,
    rest: Vec<u8>,
}

impl Watch {
    pub async fn open(api: &Api, path: &str, version: &str) -> io::Result<Self> {
        let path = format!("{path}?watch=true&resourceVersion={version}");
        let answer = api.open(Method::GET, &path, String::new(), JSON).await?;
        if !answer.status.is_success() {
            return Err(io::Error::other(format!("{path}: {}", answer.status)));
        }
        Ok(Self { answer, rest: Vec::new() })
    }

    /// The next change; none when the server has ended it.
    pub async fn next(&mut self) -> io::Result<Option<Value>> {
        loop {
            if let Some(end) = self.rest.iter().position(|&byte| byte == b'\n') {
                let line: Vec<_> = self.rest.drain(..=end).collect();
                return Ok(Some(serde_json::from_slice(&line)?));
            }
            let body = &mut self.answer.body;
            match std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await {
                None => return Ok(None),
                Some(frame) => {
                    let data = frame.map_err(io::Error::other)?.into_data().unwrap_or_default();
                    self.rest.extend_from_slice(&data);
                }
            }
        }
    }
}
