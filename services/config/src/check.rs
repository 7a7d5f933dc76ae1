//! Checks of several settings together, and values that derive from several settings.

use std::{fs, net::IpAddr, os::unix::fs::MetadataExt};

use crate::{
    error::{ConfigError, Problem, Source},
    load::{Config, all_settings},
    schema::{ADAPTER_SLOTS_MAX, Cluster, Model, Node, Transfer},
    types::{Dtype, KvDtype, ModelPath, Pair, ReasoningFormatName, Secret, ToolFormatName},
    value::Value,
};

impl Config {
    /// Checks settings that depend on each other. A default above a limit that the operator set is
    /// lowered: with a small `timeout_max` the default of `timeout` shrinks too. Set values that
    /// exclude each other are reported.
    pub(crate) fn check_combinations(&mut self, problems: &mut Vec<Problem>) {
        let mut conflicts = Vec::new();
        self.check_limits(&mut conflicts);
        self.check_cpus(&mut conflicts);
        self.check_models(&mut conflicts);
        self.check_kv_dtype(&mut conflicts);
        self.check_admin(&mut conflicts);
        self.check_tls(&mut conflicts);
        self.check_transfer(&mut conflicts);
        self.check_cluster(&mut conflicts);
        self.check_etcd(&mut conflicts);
        problems.extend(conflicts.into_iter().map(|message| Problem::Conflict { message }));
    }

    /// Returns a warning for each secret that crosses a network unencrypted, and for each file with
    /// a secret that every user of the machine can read or change.
    pub(crate) fn exposed_secrets(&self) -> Vec<String> {
        let (router, cluster) = (&self.router, &self.cluster);
        let mut warnings = Vec::new();
        let is_remote = !router.admin.ip().is_loopback();
        if is_remote && router.admin_keys.is_some() && router.tls_cert.is_none() {
            warnings.push(format!(
                "{} = {} is not a loopback address, and router.tls_cert is not set: the keys of operators cross \
                 the network unencrypted",
                self.at("router.admin"),
                router.admin,
            ));
        }
        let plain = cluster.etcd.iter().find(|url| !url.is_https() && !url.is_loopback());
        if let Some(url) = plain.filter(|_| cluster.etcd_password.is_some()) {
            warnings.push(format!(
                "{} has {url}, which is not https: cluster.etcd_password crosses the network unencrypted",
                self.at("cluster.etcd"),
            ));
        }
        for (key, path) in [
            ("cluster.secret_file", &cluster.secret_file),
            ("cluster.tls_key", &cluster.tls_key),
            ("cluster.etcd_key", &cluster.etcd_key),
            ("router.tls_key", &router.tls_key),
        ] {
            let Some(path) = path else { continue };
            // The reader of the file reports that the file is missing.
            let Ok(metadata) = fs::metadata(path) else { continue };
            let mode = metadata.mode() & 0o777;
            if mode & 0o006 != 0 {
                warnings.push(format!(
                    "{} = {} has mode {mode:04o}: every user of the machine can use the file; expected 0600 or 0640",
                    self.at(key),
                    path.display(),
                ));
            }
        }
        warnings
    }

    /// Returns the key with the source of its value.
    fn at(&self, key: &str) -> String {
        format!("{key} ({})", self.source_of(key))
    }

    fn check_kv_dtype(&self, conflicts: &mut Vec<String>) {
        let Model { dtype, kv_dtype, .. } = self.model;
        if dtype == Dtype::F32 && kv_dtype != KvDtype::Auto {
            conflicts.push(format!(
                "cannot use {} = {kv_dtype} with {} = f32; expected auto",
                self.at("model.kv_dtype"),
                self.at("model.dtype"),
            ));
        }
    }

    fn check_limits(&mut self, conflicts: &mut Vec<String>) {
        let Node { chunk_tokens, slots, step_tokens, .. } = &self.node;
        for (key, value, reason) in [
            ("node.chunk_tokens", chunk_tokens, "a chunk is part of a step"),
            ("node.slots", slots, "each row of the batch takes a token of the step"),
        ] {
            if let (Some(value), Some(step)) = (value.set(), step_tokens.set())
                && value > step
            {
                let (at, step_at) = (self.at(key), self.at("node.step_tokens"));
                conflicts.push(format!("{at} = {value} exceeds {step_at} = {step}: {reason}"));
            }
        }
        let adapters = self.model.adapters.len();
        let slots = self.model.adapter_slots.set().unwrap_or(ADAPTER_SLOTS_MAX);
        if adapters > slots as usize {
            let (at, slots_at) = (self.at("model.adapters"), self.at("model.adapter_slots"));
            let excess = format!("{at} has {adapters} adapters, more than {slots_at} = {slots}");
            conflicts.push(format!("{excess}: each adapter takes a slot"));
        }
        let ngram_max = ("node.speculate_ngram_max", self.node.speculate_ngram_max);
        let key = "node.speculate_ngram_min";
        conflicts.extend(self.lower(key, ngram_max, |it| &mut it.node.speculate_ngram_min));
        let timeout_max = ("router.timeout_max", self.router.timeout_max);
        conflicts
            .extend(self.lower("router.timeout", timeout_max, |config| &mut config.router.timeout));
        // A longer waiting queue than `requests_max` is allowed and has no effect.
        let requests_max = ("router.requests_max", self.router.requests_max);
        self.lower("router.waiting_max", requests_max, |config| &mut config.router.waiting_max);
    }

    /// Lowers the default of `key` to the limit. Returns the conflict when a set value exceeds the
    /// limit.
    fn lower<T: Value + PartialOrd>(
        &mut self,
        key: &str,
        (limit_key, limit): (&str, T),
        field: impl Fn(&mut Self) -> &mut T,
    ) -> Option<String> {
        let value = field(self).clone();
        if value <= limit {
            return None;
        }
        if self.source_of(key) != Source::Default {
            let (at, limit_at) = (self.at(key), self.at(limit_key));
            return Some(format!("{at} = {} exceeds {limit_at} = {}", value.show(), limit.show()));
        }
        if let Some(explained) = self.explained.iter_mut().find(|e| e.setting.key() == key) {
            explained.value = limit.show();
        }
        *field(self) = limit;
        None
    }

    fn check_cpus(&self, conflicts: &mut Vec<String>) {
        let node = &self.node;
        let Some(cpus) = &node.cpus else { return };
        let cpus_at = self.at("node.cpus");
        if let Some(numa_node) = node.numa_node {
            let numa_at = self.at("node.numa_node");
            conflicts.push(format!(
                "{cpus_at} = {cpus} and {numa_at} = {numa_node} are both set; give one"
            ));
        }
        let count = cpus.cpus().len();
        if let Some(threads) = node.threads.filter(|threads| *threads as usize > count) {
            conflicts.push(format!(
                "{} = {threads} exceeds the {count} CPUs of {cpus_at} = {cpus}: each thread needs a CPU",
                self.at("node.threads"),
            ));
        }
    }

    fn check_models(&self, conflicts: &mut Vec<String>) {
        let router = &self.router;
        let mut names: Vec<&str> = Vec::new();
        let first = self.model.served_name().ok();
        names.extend(first.as_deref());
        let models_at = self.at("router.models");
        for Pair { name, value } in &router.models {
            if ModelPath::parse(value).is_none() {
                let allowed = <ModelPath as Value>::allowed();
                conflicts.push(format!("{models_at} has {name}={value}; allowed: {allowed}"));
            }
            if names.contains(&name.as_str()) {
                conflicts
                    .push(format!("{models_at} names {name:?}, but another model has this name"));
            }
            names.push(name);
        }
        let added: Vec<&str> = router.models.iter().map(|model| model.name.as_str()).collect();
        for (key, pairs) in [
            ("router.chat_templates", &router.chat_templates),
            ("router.tool_formats", &router.tool_formats),
            ("router.reasoning_formats", &router.reasoning_formats),
        ] {
            for (index, pair) in pairs.iter().enumerate() {
                if !added.contains(&pair.name.as_str()) {
                    let allowed = match added.is_empty() {
                        true => "none, because router.models is empty".to_owned(),
                        false => added.join(", "),
                    };
                    conflicts.push(format!(
                        "{} has {pair}: router.models has no {:?}; allowed: {allowed}",
                        self.at(key),
                        pair.name,
                    ));
                }
                if pairs[..index].iter().any(|other| other.name == pair.name) {
                    conflicts.push(format!("{} names {:?} twice", self.at(key), pair.name));
                }
            }
        }
        for pair in &router.tool_formats {
            if ToolFormatName::parse(&pair.value).is_none() {
                let allowed = <ToolFormatName as Value>::allowed();
                let at = self.at("router.tool_formats");
                conflicts.push(format!("{at} has {pair}; allowed: {allowed}"));
            }
        }
        for pair in &router.reasoning_formats {
            if ReasoningFormatName::parse(&pair.value).is_none() {
                let allowed = <ReasoningFormatName as Value>::allowed();
                let at = self.at("router.reasoning_formats");
                conflicts.push(format!("{at} has {pair}; allowed: {allowed}"));
            }
        }
        let aliases_at = self.at("router.aliases");
        let models = names.clone();
        for pair @ Pair { name: alias, value: name } in &router.aliases {
            // The first model may still be unknown: `baton up` finds it after it has read the
            // settings.
            if first.is_some() && !models.contains(&name.as_str()) {
                conflicts.push(format!(
                    "{aliases_at} has {pair}: there is no model {name:?}; allowed: {}",
                    models.join(", "),
                ));
            }
            if names.contains(&alias.as_str()) {
                conflicts.push(format!("{aliases_at} has {pair}: {alias:?} is already taken"));
            }
            names.push(alias);
        }
    }

    fn check_admin(&self, conflicts: &mut Vec<String>) {
        let router = &self.router;
        if !router.admin.ip().is_loopback() && router.admin_keys.is_none() {
            conflicts.push(format!(
                "{} = {} is not a loopback address; set router.admin_keys, so that only operators \
                 drain nodes",
                self.at("router.admin"),
                router.admin,
            ));
        }
    }

    fn check_tls(&self, conflicts: &mut Vec<String>) {
        let cert = ("router.tls_cert", self.router.tls_cert.is_some());
        let key = ("router.tls_key", self.router.tls_key.is_some());
        conflicts.extend(self.check_both(cert, key));
        let cluster = &self.cluster;
        let cert = ("cluster.tls_cert", cluster.tls_cert.is_some());
        let key = ("cluster.tls_key", cluster.tls_key.is_some());
        let ca = ("cluster.tls_ca", cluster.tls_ca.is_some());
        conflicts.extend(self.check_both(cert, key));
        conflicts.extend(self.check_both(cert, ca));
    }

    /// Returns the conflict when only one of two settings is set.
    fn check_both(&self, one: (&str, bool), other: (&str, bool)) -> Option<String> {
        let (set, unset) = if one.1 { (one.0, other.0) } else { (other.0, one.0) };
        (one.1 != other.1).then(|| format!("{} is set without {unset}; give both", self.at(set)))
    }

    fn check_transfer(&self, conflicts: &mut Vec<String>) {
        let transfer = &self.transfer;
        if transfer.advertise.is_none()
            && (transfer.control.ip().is_unspecified() || transfer.data.ip().is_unspecified())
        {
            conflicts.push(format!(
                "{} = {} or {} = {} listens on every address; set transfer.advertise to the host \
                 under which peers reach this node",
                self.at("transfer.control"),
                transfer.control,
                self.at("transfer.data"),
                transfer.data,
            ));
        }
    }

    fn check_cluster(&self, conflicts: &mut Vec<String>) {
        if self.cluster.secret.is_some() && self.cluster.secret_file.is_some() {
            let (secret, file) = (self.at("cluster.secret"), self.at("cluster.secret_file"));
            conflicts.push(format!("{secret} and {file} are both set; give one"));
        }
        let urls: Vec<_> = self.cluster.prefill.iter().chain(&self.cluster.decode).collect();
        for (index, url) in urls.iter().enumerate() {
            if urls[..index].contains(url) {
                let (prefill, decode) = (self.at("cluster.prefill"), self.at("cluster.decode"));
                conflicts.push(format!(
                    "{url} is listed twice in {prefill} and {decode}; a node has one role"
                ));
            }
        }
    }

    fn check_etcd(&self, conflicts: &mut Vec<String>) {
        let cluster = &self.cluster;
        if cluster.etcd.is_empty() {
            return;
        }
        let etcd = self.at("cluster.etcd");
        for (key, list) in
            [("cluster.prefill", &cluster.prefill), ("cluster.decode", &cluster.decode)]
        {
            if !list.is_empty() {
                let listed = self.at(key);
                conflicts
                    .push(format!("{etcd} and {listed} are both set; list the nodes or use etcd"));
            }
        }
        let https = cluster.etcd.iter().filter(|url| url.is_https()).count();
        if https > 0 && https < cluster.etcd.len() {
            conflicts
                .push(format!("{etcd} has http and https endpoints; give all of them one scheme"));
        } else if https > 0 && cluster.etcd_ca.is_none() {
            conflicts
                .push(format!("{etcd} is https; set cluster.etcd_ca to trust its certificate"));
        }
        let ca = ("cluster.etcd_ca", cluster.etcd_ca.is_some());
        let cert = ("cluster.etcd_cert", cluster.etcd_cert.is_some());
        let private_key = ("cluster.etcd_key", cluster.etcd_key.is_some());
        for (key, is_set) in [ca, cert, private_key] {
            if https == 0 && is_set {
                conflicts.push(format!("{} is set, but {etcd} is not https", self.at(key)));
            }
        }
        let user = ("cluster.etcd_user", cluster.etcd_user.is_some());
        let password = ("cluster.etcd_password", cluster.etcd_password.is_some());
        for (one, other) in [(user, password), (cert, private_key)] {
            conflicts.extend(self.check_both(one, other));
        }
        if self.node.grpc.ip().is_unspecified() && self.transfer.advertise.is_none() {
            conflicts.push(format!(
                "{} = {} listens on every address; set transfer.advertise to the host under which \
                 routers reach this node",
                self.at("node.grpc"),
                self.node.grpc,
            ));
        }
    }
}

/// Returns the error for a missing required setting.
pub(crate) fn missing(key: &str) -> ConfigError {
    let setting = all_settings().into_iter().find(|setting| setting.key() == key);
    let setting = setting.expect("the key is written in this crate and its settings are tested");
    Problem::Missing { key: setting.key(), flag: setting.flag(), env: setting.env() }.into()
}

impl Model {
    /// Returns `path`, which every service requires.
    pub fn required_path(&self) -> Result<&ModelPath, ConfigError> {
        self.path.as_ref().ok_or_else(|| missing("model.path"))
    }

    /// Returns `name`, or the name that derives from `path`.
    pub fn served_name(&self) -> Result<String, ConfigError> {
        if let Some(name) = &self.name {
            return Ok(name.clone());
        }
        self.required_path()?.served_name().ok_or_else(|| missing("model.name"))
    }
}

impl Cluster {
    /// Returns the secret from its setting or file, without surrounding white space.
    pub fn required_secret(&self) -> Result<Secret, ConfigError> {
        if let Some(secret) = &self.secret {
            return Ok(secret.clone());
        }
        let Some(path) = &self.secret_file else { return Err(missing("cluster.secret_file")) };
        let text = fs::read_to_string(path)
            .map_err(|reason| Problem::FileUnreadable { path: path.clone(), reason })?;
        Secret::from_text(&text).ok_or_else(|| {
            let message = format!(
                "cluster.secret_file = {}: expected a file with {}",
                path.display(),
                <Secret as Value>::allowed()
            );
            Problem::Conflict { message }.into()
        })
    }
}

impl Transfer {
    /// Returns the host under which peers reach this node, in the form for `tcp://HOST:PORT`.
    pub fn advertised_host(&self) -> String {
        match &self.advertise {
            Some(host) => host.clone(),
            None => url_host(self.control.ip()),
        }
    }

    /// Returns the host under which routers reach a node that listens on `listens`.
    pub fn advertised_grpc_host(&self, listens: IpAddr) -> String {
        match &self.advertise {
            Some(host) if listens.is_unspecified() => host.clone(),
            _ => url_host(listens),
        }
    }
}

fn url_host(ip: IpAddr) -> String {
    match ip {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    }
}
