//! `guestlet.v1.Accounts`: who is logged in, passwords and SSH keys, for the host half, by the verbs that QGA clients have.

use std::time::UNIX_EPOCH;

use tonic::{Code, Request, Response, Status};

use crate::guest::passwords::Secret;
use crate::guest::ssh_keys::{self, Change};
use crate::guest::{Guest, accounts, passwords, users};
use crate::rpc::guard;
use crate::rpc::guest::may_work;
use crate::sys::error_chain;
use crate::wire::proto::v1;
use crate::wire::proto::v1::accounts_server::{self, AccountsServer};

/// Implementation of the gRPC service.
#[derive(Debug, Clone)]
pub struct Service(Guest);

impl Service {
    /// A service over this guest.
    pub fn new(guest: Guest) -> Self {
        Self(guest)
    }

    /// The service as HTTP/2 serves it.
    pub fn into_server(self) -> AccountsServer<Self> {
        AccountsServer::new(self)
    }

    async fn change(&self, user: String, change: Change) -> Result<(), Status> {
        may_work()?;
        ssh_keys::change(&self.0, user, change).await.map_err(|error| no_keys(&error))
    }
}

fn no_keys(error: &ssh_keys::Error) -> Status {
    let code = match error {
        ssh_keys::Error::NoKey(_) | ssh_keys::Error::Account(accounts::Error::Name) => Code::InvalidArgument,
        _ => Code::FailedPrecondition,
    };
    Status::new(code, error_chain::words(error))
}

fn no_password(error: &passwords::Error) -> Status {
    let code = match error {
        passwords::Error::Password | passwords::Error::Account(accounts::Error::Name) => {
            Code::InvalidArgument
        }
        _ => Code::FailedPrecondition,
    };
    Status::new(code, error_chain::words(error))
}

#[tonic::async_trait]
impl accounts_server::Accounts for Service {
    async fn list_users(
        &self,
        _: Request<v1::ListUsersRequest>,
    ) -> Result<Response<v1::ListUsersResponse>, Status> {
        may_work()?;
        let found = users::users(&self.0).await;
        let found = found.map_err(|error| Status::internal(error_chain::words(&error)))?;
        let user = |one: users::User| v1::LoggedInUser {
            user: one.name,
            since: UNIX_EPOCH.checked_add(one.since).map(Into::into),
        };
        Ok(Response::new(v1::ListUsersResponse { users: found.into_iter().map(user).collect() }))
    }

    async fn set_password(
        &self,
        request: Request<v1::SetPasswordRequest>,
    ) -> Result<Response<v1::SetPasswordResponse>, Status> {
        guard::concerns(&request, || request.get_ref().user.clone());
        may_work()?;
        let v1::SetPasswordRequest { user, password, crypted, .. } = request.into_inner();
        let set = passwords::set(&self.0, user, Secret::new(password), crypted).await;
        set.map_err(|error| no_password(&error))?;
        Ok(Response::new(v1::SetPasswordResponse {}))
    }

    async fn list_authorized_keys(
        &self,
        request: Request<v1::ListAuthorizedKeysRequest>,
    ) -> Result<Response<v1::ListAuthorizedKeysResponse>, Status> {
        guard::concerns(&request, || request.get_ref().user.clone());
        may_work()?;
        let keys = ssh_keys::list(&self.0, request.into_inner().user).await;
        let keys = keys.map_err(|error| no_keys(&error))?;
        Ok(Response::new(v1::ListAuthorizedKeysResponse { keys }))
    }

    async fn add_authorized_keys(
        &self,
        request: Request<v1::AddAuthorizedKeysRequest>,
    ) -> Result<Response<v1::AddAuthorizedKeysResponse>, Status> {
        guard::concerns(&request, || request.get_ref().user.clone());
        let v1::AddAuthorizedKeysRequest { user, keys, reset, .. } = request.into_inner();
        self.change(user, if reset { Change::Reset(keys) } else { Change::Add(keys) }).await?;
        Ok(Response::new(v1::AddAuthorizedKeysResponse {}))
    }

    async fn remove_authorized_keys(
        &self,
        request: Request<v1::RemoveAuthorizedKeysRequest>,
    ) -> Result<Response<v1::RemoveAuthorizedKeysResponse>, Status> {
        guard::concerns(&request, || request.get_ref().user.clone());
        let v1::RemoveAuthorizedKeysRequest { user, keys, .. } = request.into_inner();
        self.change(user, Change::Remove(keys)).await?;
        Ok(Response::new(v1::RemoveAuthorizedKeysResponse {}))
    }
}
