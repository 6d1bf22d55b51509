//! What people ask of a simulated guest, and its answers.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use guestlet::guest::Guest;
use guestlet::sys::effects::Effects;
use guestlet::sys::root::Root;
use guestlet::wire::proto::v1::metrics_server::Metrics;
use guestlet::wire::proto::v1::power_server::Power;
use guestlet::wire::proto::v1::qga_server::Qga;
use guestlet::wire::proto::v1::{
    CollectMetricsRequest, CollectMetricsResponse, ExecuteQgaRequest, ExecuteQgaResponse, ShutdownRequest,
    ShutdownResponse, SuspendResponse, SuspendToBothRequest, SuspendToDiskRequest, SuspendToMemoryRequest,
};
use tonic::{Request, Response, Status};

/// A guest's answers to what people ask, as a test wants them.
#[derive(Debug, Default, Clone)]
pub struct Machine(Arc<Mutex<Doings>>);

#[derive(Debug, Default)]
pub struct Doings {
    /// What a command of QGA is answered with; none: nothing ever is.
    pub answer: Option<Vec<u8>>,
    /// What it says that it measures; none: it never says anything.
    pub metrics: Option<CollectMetricsResponse>,
    /// What was asked, and for whom.
    pub asked: Vec<(String, String)>,
    /// What the services of real agents see, from the next session on; none: nothing of any machine.
    pub laid_out: Option<Guest>,
}

/// A machine on which nothing can be done.
#[derive(Debug)]
struct Nothing;

impl Effects for Nothing {}

impl Machine {
    pub fn lock(&self) -> MutexGuard<'_, Doings> {
        self.0.lock().unwrap()
    }

    /// What the services of real agents see.
    pub fn laid_out(&self) -> Guest {
        let nothing = || Guest {
            root: Root::at(Path::new("/nonexistent/guest")),
            effects: Arc::new(Nothing),
            ..Guest::default()
        };
        self.lock().laid_out.clone().unwrap_or_else(nothing)
    }

    fn note<T>(&self, what: &str, request: &Request<T>) {
        let caller = request.metadata().get("guestlet-caller").unwrap().to_str().unwrap();
        self.lock().asked.push((what.to_owned(), caller.to_owned()));
    }
}

#[tonic::async_trait]
impl Qga for Machine {
    async fn execute_qga(
        &self,
        request: Request<ExecuteQgaRequest>,
    ) -> Result<Response<ExecuteQgaResponse>, Status> {
        self.note(&String::from_utf8_lossy(&request.get_ref().command), &request);
        assert_eq!(request.get_ref().name, "", "a guest is not told what its VM is called");
        let answer = self.lock().answer.clone();
        match answer {
            Some(answer) => Ok(Response::new(ExecuteQgaResponse { answer })),
            None => std::future::pending().await,
        }
    }
}

#[tonic::async_trait]
impl Metrics for Machine {
    async fn collect_metrics(
        &self,
        request: Request<CollectMetricsRequest>,
    ) -> Result<Response<CollectMetricsResponse>, Status> {
        assert!(
            request.metadata().get("guestlet-caller").is_none(),
            "nobody has asked for it but the host half"
        );
        let answer = self.lock().metrics.clone();
        match answer {
            Some(answer) => Ok(Response::new(answer)),
            None => std::future::pending().await,
        }
    }
}

#[tonic::async_trait]
impl Power for Machine {
    async fn shutdown(
        &self,
        request: Request<ShutdownRequest>,
    ) -> Result<Response<ShutdownResponse>, Status> {
        self.note(request.get_ref().mode().as_str_name(), &request);
        Ok(Response::new(ShutdownResponse {}))
    }

    async fn suspend_to_memory(
        &self,
        request: Request<SuspendToMemoryRequest>,
    ) -> Result<Response<SuspendResponse>, Status> {
        self.note("memory", &request);
        Ok(Response::new(SuspendResponse {}))
    }

    async fn suspend_to_disk(
        &self,
        request: Request<SuspendToDiskRequest>,
    ) -> Result<Response<SuspendResponse>, Status> {
        self.note("disk", &request);
        Ok(Response::new(SuspendResponse {}))
    }

    async fn suspend_to_both(
        &self,
        request: Request<SuspendToBothRequest>,
    ) -> Result<Response<SuspendResponse>, Status> {
        self.note("both", &request);
        // Time for something else to happen before.
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        Err(Status::failed_precondition("this guest cannot be suspended to both: no\x1b[2J swap"))
    }
}
