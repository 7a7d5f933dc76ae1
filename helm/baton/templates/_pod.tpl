{{- /*
Pod template of a router, a node or a group of nodes. Fields: root, path (of the values), component, model (the key, nodes only), values,
program, toml, models (by key), ports, grace.
*/ -}}
{{- define "baton.pod" -}}
{{- $ := .root -}}
{{- $values := .values -}}
{{- $path := .path -}}
{{- $rdma := and $values.gpus $.Values.gpu.rdma.resource -}}
{{- $selector := not .model | ternary (list $ .component) (list $ .component .model) -}}
metadata:
  labels: {{ include "baton.extend" (list (include "baton.selector" $selector | fromYaml) $values.podLabels (printf "%s.podLabels" .path)) | nindent 4 }}
  annotations: {{ include "baton.extend" (list (dict "checksum/config" (sha256sum .toml)) $values.podAnnotations (printf "%s.podAnnotations" .path)) | nindent 4 }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .grace }}
  {{- with $.Values.serviceAccountName }}
  serviceAccountName: {{ . | quote }}
  {{- end }}
  {{- with $.Values.image.pullSecrets }}
  imagePullSecrets: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- if and $values.gpus $.Values.gpu.runtimeClassName }}
  runtimeClassName: {{ $.Values.gpu.runtimeClassName | quote }}
  {{- end }}
  {{- if and $values.gpus $.Values.gpu.hostNetwork }}
  {{- include "baton.privileged" (list $ "gpu.hostNetwork is true") }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with concat $values.tolerations (not $values.gpus | ternary list $.Values.gpu.tolerations) }}
  tolerations: {{ toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    {{- with $values.topologySpreadConstraints }}
    {{- toYaml . | nindent 4 }}
    {{- else }}
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {{ include "baton.selector" $selector | nindent 10 }}
      matchLabelKeys: [pod-template-hash]
    {{- end }}
  securityContext: {{ toYaml $.Values.podSecurityContext | nindent 4 }}
  containers:
    - name: baton-{{ .component }}
      image: {{ include "baton.image" (list $ $.Values.image) | quote }}
      imagePullPolicy: {{ $.Values.image.pullPolicy }}
      command: {{ concat .program (list "--config" "/etc/baton/config/baton.toml") | toJson }}
      terminationMessagePolicy: FallbackToLogsOnError
      {{- $security := deepCopy $.Values.securityContext }}
      {{- if and $rdma $.Values.gpu.rdma.ipcLock }}
      {{- include "baton.privileged" (list $ "gpu.rdma.ipcLock is true: pods run as root with the capability IPC_LOCK") }}
      {{- /* Kubernetes gives an added capability to processes of root only. */ -}}
      {{- $security = merge (dict "runAsNonRoot" false "runAsUser" 0 "capabilities" (dict "add" (list "IPC_LOCK"))) $security }}
      {{- end }}
      securityContext: {{ toYaml $security | nindent 8 }}
      ports:
        {{- range $name, $port := .ports }}
        - {name: {{ $name }}, containerPort: {{ $port }}}
        {{- end }}
      env: {{ include "baton.entries" (list (include "baton.env" . | fromYamlArray) $values.env (printf "%s.env" .path) "name") | nindent 8 }}
      {{- $resources := deepCopy $values.resources }}
      {{- $limits := $resources.limits | default dict }}
      {{- with $values.gpus }}{{- $_ := set $limits $.Values.gpu.resource (int64 .) }}{{- end }}
      {{- with $rdma }}{{- $_ := set $limits . (int64 $.Values.gpu.rdma.count) }}{{- end }}
      {{- with $limits }}{{- $_ := set $resources "limits" . }}{{- end }}
      resources: {{ toYaml $resources | nindent 8 }}
      # A router downloads tokenizers before it serves /live. Nodes serve /live at once, and exit if they have not loaded the model within an hour. A startup probe of /ready would delay readiness by up to a second.
      startupProbe: {httpGet: {path: /live, port: {{ .probes }}{{ if $values.tlsSecret }}, scheme: HTTPS{{ end }}}, periodSeconds: 1, timeoutSeconds: 2, failureThreshold: {{ int64 $.Values.loadSeconds }}}
      readinessProbe: {httpGet: {path: /ready, port: {{ .probes }}{{ if $values.tlsSecret }}, scheme: HTTPS{{ end }}}, periodSeconds: 1, timeoutSeconds: 2, failureThreshold: 1}
      livenessProbe: {httpGet: {path: /live, port: {{ .probes }}{{ if $values.tlsSecret }}, scheme: HTTPS{{ end }}}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 3}
      volumeMounts: {{ include "baton.entries" (list (include "baton.mounts" . | fromYamlArray) $values.volumeMounts (printf "%s.volumeMounts" .path) "mountPath") | nindent 8 }}
  {{- $volumes := include "baton.entries" (list (include "baton.volumes" . | fromYamlArray) $values.volumes (printf "%s.volumes" .path) "name") }}
  {{- range fromYamlArray $volumes }}
  {{- if .hostPath }}{{ include "baton.privileged" (list $ (printf "volume %s of %s is a hostPath" .name $path)) }}{{ end }}
  {{- end }}
  volumes: {{ $volumes | nindent 4 }}
{{- end -}}

{{- /* Environment variables of a container. Fields as of baton.pod. */ -}}
{{- define "baton.env" -}}
{{- $ := .root -}}
{{- $values := .values -}}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: POD_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: HOST_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name=$(POD_NAMESPACE),k8s.pod.name=$(POD_NAME),k8s.node.name=$(HOST_NAME),k8s.container.name=baton-{{ .component }},baton.release={{ $.Release.Name }}
{{- if ne .component "group" }}
- {name: BATON_TELEMETRY_INSTANCE, value: $(POD_NAME)}
{{- end }}
- {name: BATON_CLUSTER_SECRET, valueFrom: {secretKeyRef: {name: {{ include "baton.secret" $ | quote }}, key: secret}}}
{{- if .model }}
- {name: BATON_NODE_ID, value: $(POD_NAME)}
- {name: BATON_TRANSFER_ADVERTISE, value: $(POD_IP)}
{{- end }}
- {name: HF_HOME, value: /cache/huggingface}
- {name: XDG_CACHE_HOME, value: /cache}
{{- with $.Values.huggingFace.tokenSecret }}
- {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: token}}}
{{- end }}
{{- with $.Values.etcd.authSecret }}
- {name: BATON_CLUSTER_ETCD_USER, valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: username}}}
- {name: BATON_CLUSTER_ETCD_PASSWORD, valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: password}}}
{{- end }}
{{- end -}}

{{- /* Mounts of a container. Fields as of baton.pod. */ -}}
{{- define "baton.mounts" -}}
{{- $ := .root -}}
{{- $values := .values -}}
- {name: config, mountPath: /etc/baton/config, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /cache}
{{- range $name, $secret := dict "tls" $values.tlsSecret "keys" $values.keysSecret "admin-keys" $values.adminKeysSecret }}{{- if $secret }}
- {name: {{ $name }}, mountPath: /etc/baton/{{ $name }}, readOnly: true}
{{- end }}{{- end }}
{{- if $.Values.clusterTls.secret }}
- {name: cluster-tls, mountPath: /etc/baton/cluster, readOnly: true}
{{- end }}
{{- if $.Values.etcd.tlsSecret }}
- {name: etcd-tls, mountPath: /etc/baton/etcd, readOnly: true}
{{- end }}
{{- if $values.shm }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if dig "tier" "volume" "" $values }}
- {name: tier, mountPath: /tier}
{{- end }}
{{- range $key, $it := .models }}{{- if $it.volume }}
- {name: model-{{ $key }}, mountPath: /models/{{ $key }}, readOnly: true}
{{- end }}{{- end }}
{{- end -}}

{{- /* Volumes of a pod. Fields as of baton.pod. */ -}}
{{- define "baton.volumes" -}}
{{- $ := .root -}}
{{- $values := .values -}}
- {name: config, configMap: {name: {{ .name }}}}
- {name: tmp, emptyDir: {}}
- name: cache
  {{- include "baton.cache" $ | nindent 2 }}
{{- range $name, $secret := dict "tls" $values.tlsSecret "keys" $values.keysSecret "admin-keys" $values.adminKeysSecret }}{{- with $secret }}
- {name: {{ $name }}, secret: {secretName: {{ . | quote }}, defaultMode: 0440}}
{{- end }}{{- end }}
{{- with $.Values.clusterTls.secret }}
- {name: cluster-tls, secret: {secretName: {{ . | quote }}, defaultMode: 0440}}
{{- end }}
{{- with $.Values.etcd.tlsSecret }}
- {name: etcd-tls, secret: {secretName: {{ . | quote }}, defaultMode: 0440}}
{{- end }}
{{- with $values.shm }}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ . | quote }}}}
{{- end }}
{{- with dig "tier" "volume" "" $values }}
- name: tier
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $key, $it := .models }}{{- if $it.volume }}
- name: model-{{ $key }}
  {{- toYaml $it.volume | nindent 2 }}
{{- end }}{{- end }}
{{- end -}}

{{- /* Volume of the model cache. */ -}}
{{- define "baton.cache" -}}
{{- $cache := .Values.modelCache -}}
{{- if not $cache.claim.size -}}
{{- toYaml ($cache.volume | default (dict "emptyDir" dict)) -}}
{{- else if $cache.volume -}}
{{- fail "modelCache.volume and modelCache.claim.size are set; expected one" -}}
{{- else -}}
persistentVolumeClaim: {claimName: {{ include "baton.name" (list . "cache") }}}
{{- end -}}
{{- end -}}

{{- /* The ConfigMap of a component and, if the component can have two or more replicas, its PodDisruptionBudget. Fields as of baton.pod. */ -}}
{{- define "baton.around" -}}
{{- $selector := not .model | ternary (list .root .component) (list .root .component .model) -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ .name }}
  labels: {{ include "baton.labels" $selector | nindent 4 }}
data:
  baton.toml: | {{ .toml | nindent 4 }}
{{- $scaling := .values.autoscaling }}
{{- if ge (int64 ($scaling.enabled | ternary $scaling.max .values.replicas)) 2 }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels: {{ include "baton.labels" $selector | nindent 4 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{ include "baton.selector" $selector | nindent 6 }}
{{- end }}
{{- end -}}
