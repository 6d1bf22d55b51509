//! The messages of the container runtime interface (CRI), as far as kubelet needs an answer. Numbers are the same in
//! `runtime.v1alpha2` of Kubernetes 1.20 and in `runtime.v1` of 1.36; fields that nobody here reads or sets are left out.

use std::collections::HashMap;

macro_rules! messages {
    ($($(#[$of:meta])* $name:ident { $($(#[$about:meta])+ $field:ident: $type:ty,)* })*) => {
        $(
            $(#[$of])*
            #[derive(Clone, PartialEq, prost::Message)]
            pub struct $name { $($(#[$about])+ pub $field: $type,)* }
        )*
    };
}

type Texts = HashMap<String, String>;

messages! {
    Empty {}

    VersionResponse {
        #[prost(string, tag = "1")]
        version: String,
        #[prost(string, tag = "2")]
        runtime_name: String,
        #[prost(string, tag = "3")]
        runtime_version: String,
        #[prost(string, tag = "4")]
        runtime_api_version: String,
    }
    StatusResponse {
        #[prost(message, tag = "1")]
        status: Option<RuntimeStatus>,
    }
    RuntimeStatus {
        #[prost(message, repeated, tag = "1")]
        conditions: Vec<RuntimeCondition>,
    }
    RuntimeCondition {
        #[prost(string, tag = "1")]
        r#type: String,
        #[prost(bool, tag = "2")]
        status: bool,
    }

    /// A request or an answer that is nothing but the id of a sandbox or a container.
    Id {
        #[prost(string, tag = "1")]
        id: String,
    }
    /// What a list is narrowed to.
    SandboxFilter {
        #[prost(string, tag = "1")]
        id: String,
        #[prost(message, tag = "2")]
        state: Option<State>,
        #[prost(map = "string, string", tag = "3")]
        labels: Texts,
    }
    ContainerFilter {
        #[prost(string, tag = "1")]
        id: String,
        #[prost(message, tag = "2")]
        state: Option<State>,
        #[prost(string, tag = "3")]
        sandbox: String,
        #[prost(map = "string, string", tag = "4")]
        labels: Texts,
    }
    State {
        #[prost(int32, tag = "1")]
        state: i32,
    }

    RunPodSandboxRequest {
        #[prost(message, tag = "1")]
        config: Option<SandboxConfig>,
    }
    SandboxConfig {
        #[prost(message, tag = "1")]
        metadata: Option<SandboxMetadata>,
        #[prost(string, tag = "3")]
        log_directory: String,
        #[prost(map = "string, string", tag = "6")]
        labels: Texts,
        #[prost(map = "string, string", tag = "7")]
        annotations: Texts,
    }
    SandboxMetadata {
        #[prost(string, tag = "1")]
        name: String,
        #[prost(string, tag = "2")]
        uid: String,
        #[prost(string, tag = "3")]
        namespace: String,
        #[prost(uint32, tag = "4")]
        attempt: u32,
    }
    ListPodSandboxRequest {
        #[prost(message, tag = "1")]
        filter: Option<SandboxFilter>,
    }
    ListPodSandboxResponse {
        #[prost(message, repeated, tag = "1")]
        items: Vec<Sandbox>,
    }
    Sandbox {
        #[prost(string, tag = "1")]
        id: String,
        #[prost(message, tag = "2")]
        metadata: Option<SandboxMetadata>,
        #[prost(int32, tag = "3")]
        state: i32,
        #[prost(int64, tag = "4")]
        created_at: i64,
        #[prost(map = "string, string", tag = "5")]
        labels: Texts,
        #[prost(map = "string, string", tag = "6")]
        annotations: Texts,
    }
    PodSandboxStatusResponse {
        #[prost(message, tag = "1")]
        status: Option<SandboxStatus>,
    }
    SandboxStatus {
        #[prost(string, tag = "1")]
        id: String,
        #[prost(message, tag = "2")]
        metadata: Option<SandboxMetadata>,
        #[prost(int32, tag = "3")]
        state: i32,
        #[prost(int64, tag = "4")]
        created_at: i64,
        #[prost(message, tag = "5")]
        network: Option<Network>,
        #[prost(map = "string, string", tag = "7")]
        labels: Texts,
        #[prost(map = "string, string", tag = "8")]
        annotations: Texts,
    }
    Network {
        #[prost(string, tag = "1")]
        ip: String,
    }

    CreateContainerRequest {
        #[prost(string, tag = "1")]
        sandbox: String,
        #[prost(message, tag = "2")]
        config: Option<ContainerConfig>,
        #[prost(message, tag = "3")]
        sandbox_config: Option<SandboxConfig>,
    }
    ContainerConfig {
        #[prost(message, tag = "1")]
        metadata: Option<ContainerMetadata>,
        #[prost(message, tag = "2")]
        image: Option<ImageSpec>,
        #[prost(string, repeated, tag = "3")]
        command: Vec<String>,
        #[prost(string, repeated, tag = "4")]
        arguments: Vec<String>,
        #[prost(message, repeated, tag = "7")]
        mounts: Vec<Mount>,
        #[prost(message, repeated, tag = "8")]
        devices: Vec<Device>,
        #[prost(map = "string, string", tag = "9")]
        labels: Texts,
        #[prost(map = "string, string", tag = "10")]
        annotations: Texts,
        #[prost(string, tag = "11")]
        log_path: String,
    }
    ContainerMetadata {
        #[prost(string, tag = "1")]
        name: String,
        #[prost(uint32, tag = "2")]
        attempt: u32,
    }
    ImageSpec {
        #[prost(string, tag = "1")]
        image: String,
    }
    Mount {
        #[prost(string, tag = "1")]
        inside: String,
        #[prost(string, tag = "2")]
        outside: String,
        #[prost(bool, tag = "3")]
        is_read_only: bool,
    }
    Device {
        #[prost(string, tag = "1")]
        inside: String,
        #[prost(string, tag = "2")]
        outside: String,
    }
    ListContainersRequest {
        #[prost(message, tag = "1")]
        filter: Option<ContainerFilter>,
    }
    ListContainersResponse {
        #[prost(message, repeated, tag = "1")]
        containers: Vec<Container>,
    }
    Container {
        #[prost(string, tag = "1")]
        id: String,
        #[prost(string, tag = "2")]
        sandbox: String,
        #[prost(message, tag = "3")]
        metadata: Option<ContainerMetadata>,
        #[prost(message, tag = "4")]
        image: Option<ImageSpec>,
        #[prost(string, tag = "5")]
        image_id: String,
        #[prost(int32, tag = "6")]
        state: i32,
        #[prost(int64, tag = "7")]
        created_at: i64,
        #[prost(map = "string, string", tag = "8")]
        labels: Texts,
        #[prost(map = "string, string", tag = "9")]
        annotations: Texts,
    }
    ContainerStatusResponse {
        #[prost(message, tag = "1")]
        status: Option<ContainerStatus>,
    }
    ContainerStatus {
        #[prost(string, tag = "1")]
        id: String,
        #[prost(message, tag = "2")]
        metadata: Option<ContainerMetadata>,
        #[prost(int32, tag = "3")]
        state: i32,
        #[prost(int64, tag = "4")]
        created_at: i64,
        #[prost(int64, tag = "5")]
        started_at: i64,
        #[prost(int64, tag = "6")]
        finished_at: i64,
        #[prost(int32, tag = "7")]
        exit_code: i32,
        #[prost(message, tag = "8")]
        image: Option<ImageSpec>,
        #[prost(string, tag = "9")]
        image_id: String,
        #[prost(map = "string, string", tag = "12")]
        labels: Texts,
        #[prost(map = "string, string", tag = "13")]
        annotations: Texts,
        #[prost(string, tag = "15")]
        log_path: String,
    }

    ImageStatusRequest {
        #[prost(message, tag = "1")]
        image: Option<ImageSpec>,
    }
    ImageStatusResponse {
        #[prost(message, tag = "1")]
        image: Option<Image>,
    }
    Image {
        #[prost(string, tag = "1")]
        id: String,
        #[prost(string, repeated, tag = "2")]
        tags: Vec<String>,
        #[prost(uint64, tag = "4")]
        size: u64,
    }
}
