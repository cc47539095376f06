{{- define "rlhf.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "rlhf.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "rlhf.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "rlhf.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels of an object; takes (list $ component). */}}
{{- define "rlhf.labels" -}}
{{- $root := index . 0 -}}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: rlhf-orchestrate
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
{{ include "rlhf.selector" . }}
{{- end -}}

{{/* What selects a component's pods; takes (list $ component). */}}
{{- define "rlhf.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "rlhf.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* An image; takes (list $ name). The actor's is the trainer's where none is named. */}}
{{- define "rlhf.image" -}}
{{- $root := index . 0 -}}
{{- $image := index $root.Values.images (index . 1) -}}
{{- if not $image.repository -}}{{- $image = $root.Values.images.trainer -}}{{- end -}}
{{- printf "%s:%s" $image.repository (default $root.Chart.AppVersion $image.tag) -}}
{{- end -}}

{{/* A service account's name; takes (list $ name). */}}
{{- define "rlhf.account" -}}
{{- $root := index . 0 -}}
{{- default (printf "%s-%s" (include "rlhf.fullname" $root) (index . 1)) (index $root.Values.serviceAccounts (index . 1)) -}}
{{- end -}}

{{- define "rlhf.tokens" -}}
{{- default (printf "%s-tokens" (include "rlhf.fullname" .)) .Values.api.existingSecret -}}
{{- end -}}

{{/* Whether a development store is made ("": no); `auto`: where exchange.url names none. */}}
{{- define "rlhf.valkey" -}}
{{- include "rlhf.on" (list . .Values.valkey.enabled) -}}
{{- end -}}
{{- define "rlhf.seaweedfs" -}}
{{- include "rlhf.on" (list . .Values.seaweedfs.enabled) -}}
{{- end -}}
{{- define "rlhf.on" -}}
{{- $root := index . 0 -}}
{{- $enabled := toString (index . 1) -}}
{{- if or (eq $enabled "true") (and (eq $enabled "auto") (not $root.Values.exchange.url)) -}}true{{- end -}}
{{- end -}}
{{- define "rlhf.ownStores" -}}
{{- include "rlhf.valkey" . -}}{{- include "rlhf.seaweedfs" . -}}
{{- end -}}

{{- define "rlhf.stores" -}}
{{- printf "%s-stores" (include "rlhf.fullname" .) -}}
{{- end -}}

{{/* The secret with the exchange's credentials; "" where it needs none. */}}
{{- define "rlhf.exchangeSecret" -}}
{{- if .Values.exchange.existingSecret -}}
{{- .Values.exchange.existingSecret -}}
{{- else if or (include "rlhf.ownStores" .) .Values.exchange.role -}}
{{- include "rlhf.stores" . -}}
{{- end -}}
{{- end -}}

{{- define "rlhf.exchangeUrl" -}}
{{- $name := include "rlhf.fullname" . -}}
{{- $redis := printf "redis://%s-valkey:6379/0" $name -}}
{{- $s3 := printf "s3://%s/jobs?endpoint=http://%s-seaweedfs:8333&region=us-east-1" .Values.seaweedfs.bucket $name -}}
{{- if .Values.exchange.url -}}
{{- .Values.exchange.url -}}
{{- else if and (include "rlhf.valkey" .) (include "rlhf.seaweedfs" .) -}}
{{- printf "tiered+%s&redis=%s" $s3 $redis -}}
{{- else if include "rlhf.seaweedfs" . -}}
{{- $s3 -}}
{{- else if include "rlhf.valkey" . -}}
{{- $redis -}}
{{- else -}}
{{- fail "exchange.url: set it (tiered+s3://..., s3://..., redis://...), or leave valkey and seaweedfs on for development" -}}
{{- end -}}
{{- end -}}

{{/* Tells the release's runs from others' in the same exchange. */}}
{{- define "rlhf.runs" -}}
{{- printf "%s.%s" .Release.Namespace (include "rlhf.fullname" .) -}}
{{- end -}}

{{/* The claim of a storage; takes (list $ name). */}}
{{- define "rlhf.claim" -}}
{{- $root := index . 0 -}}
{{- default (printf "%s-%s" (include "rlhf.fullname" $root) (index . 1)) (index $root.Values.storage (index . 1)).existingClaim -}}
{{- end -}}

{{/* The pods of the API, for an affinity. */}}
{{- define "rlhf.apiTerm" -}}
{{- dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (include "rlhf.selector" (list . "api") | fromYaml)) | toJson -}}
{{- end -}}

{{/* On the node of the API's pod, where a claim that one node may mount needs it. */}}
{{- define "rlhf.besideApi" -}}
{{- if include "rlhf.oneNode" . }}
affinity:
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution: [{{ include "rlhf.apiTerm" . }}]
{{- end }}
{{- end }}

{{/* "true" where the claim that the chart makes for data can be mounted on one node only. */}}
{{- define "rlhf.oneNode" -}}
{{- if hasKey .Values.storage "runs" -}}
{{- fail "storage.runs: there is no such claim any more; runs are kept in the exchange (exchange.url), leave it out" -}}
{{- end -}}
{{- if and (not .Values.storage.data.existingClaim) (not (has "ReadWriteMany" .Values.storage.data.accessModes)) -}}true{{- end -}}
{{- end -}}

{{- define "rlhf.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.runAsUser }}
runAsGroup: {{ .Values.podSecurity.runAsUser }}
fsGroup: {{ .Values.podSecurity.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "rlhf.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "rlhf.pullSecret" -}}
{{- with .Values.imagePullSecret }}
imagePullSecrets: [{name: {{ . }}}]
{{- end }}
{{- end -}}

{{/* What lies under every job (a JSON job file): the exchange, and how functions are deployed. */}}
{{- define "rlhf.defaults" -}}
{{- $f := .Values.functions -}}
{{- $volumes := list -}}
{{- if $f.cache.existingClaim -}}
{{- $volumes = append $volumes (dict "name" "cache" "mount_path" "/cache" "claim" $f.cache.existingClaim) -}}
{{- end -}}
{{- $knative := dict
  "image" (include "rlhf.image" (list . "trainer"))
  "images" (dict "generate" (include "rlhf.image" (list . "actor")) "reward" (include "rlhf.image" (list . "actor")))
  "namespace" .Release.Namespace
  "service_account" (include "rlhf.account" (list . "functions"))
  "gpu_resource" $f.gpuResource
  "cpu_share" $f.cpuShare
  "start_s" $f.startSeconds
  "run_as_user" .Values.podSecurity.runAsUser
  "volumes" $volumes
-}}
{{- if and .Values.nodeAgent.enabled .Values.exchange.role }}
{{- fail "exchange.role: not with nodeAgent.enabled, whose processes are one user's and cannot keep credentials from each other" }}
{{- end -}}
{{- if .Values.nodeAgent.enabled }}{{ $_ := set $knative "node_agent" .Values.nodeAgent.hostPath }}{{ end -}}
{{- with $f.nodeSelector }}{{ $_ := set $knative "node_selector" . }}{{ end -}}
{{- with $f.tolerations }}{{ $_ := set $knative "tolerations" . }}{{ end -}}
{{- with $f.runtimeClass }}{{ $_ := set $knative "runtime_class" . }}{{ end -}}
{{- if .Values.sandbox.enabled }}{{ $_ := set $knative "sandbox" (printf "http://%s.%s.svc.cluster.local/run_code" (printf "%s-sandbox" (include "rlhf.fullname" .)) .Release.Namespace) }}{{ end -}}
{{- with $f.queue }}{{ $_ := set $knative "queue" . }}{{ end -}}
{{- with $f.env }}{{ $_ := set $knative "env" . }}{{ end -}}
{{- with .Values.imagePullSecret }}{{ $_ := set $knative "image_pull_secret" . }}{{ end -}}
{{- with include "rlhf.exchangeSecret" . }}{{ $_ := set $knative "env_secrets" (list .) }}{{ end -}}
{{- $own := dict "exchange" (dict "url" (include "rlhf.exchangeUrl" .)) "platform" (dict "kind" "knative" "knative" $knative) -}}
{{- mergeOverwrite $own (deepCopy .Values.jobDefaults) | toPrettyJson -}}
{{- end -}}

{{/* The Job of one launch of an orchestrator; the API puts in name, label and arguments. */}}
{{- define "rlhf.runnerJob" -}}
apiVersion: batch/v1
kind: Job
metadata:
  namespace: {{ .Release.Namespace }}
  labels:
    {{- include "rlhf.labels" (list . "runner") | nindent 4 }}
spec:
  backoffLimit: {{ .Values.runner.backoffLimit }}
  ttlSecondsAfterFinished: {{ .Values.runner.ttlSecondsAfterFinished }}
  podFailurePolicy:
    rules:
      - action: Ignore  # drained or preempted: it goes on elsewhere
        onPodConditions: [{type: DisruptionTarget, status: "True"}]
      - action: FailJob  # it has said why, in its last event
        onExitCodes: {containerName: runner, operator: In, values: [1, 2, 130]}
  template:
    metadata:
      labels:
        {{- include "rlhf.selector" (list . "runner") | nindent 8 }}
    spec:
      restartPolicy: Never
      serviceAccountName: {{ include "rlhf.account" (list . "runner") }}
      terminationGracePeriodSeconds: 90
      securityContext:
        {{- include "rlhf.podSecurity" . | nindent 8 }}
      {{- include "rlhf.pullSecret" . | nindent 6 }}
      {{- with .Values.runner.nodeSelector }}
      nodeSelector: {{ toJson . }}
      {{- end }}
      {{- with .Values.runner.tolerations }}
      tolerations: {{ toJson . }}
      {{- end }}
      {{- include "rlhf.besideApi" . | nindent 6 }}
      containers:
        - name: runner
          image: {{ include "rlhf.image" (list . "orchestrator") }}
          imagePullPolicy: {{ .Values.images.pullPolicy }}
          terminationMessagePolicy: FallbackToLogsOnError
          securityContext:
            {{- include "rlhf.containerSecurity" . | nindent 12 }}
          {{- with include "rlhf.exchangeSecret" . }}
          envFrom: [{secretRef: {name: {{ . }}}}]
          {{- end }}
          resources: {{ toJson .Values.runner.resources }}
          volumeMounts:
            {{- include "rlhf.mounts" . | nindent 12 }}
      volumes:
        {{- include "rlhf.volumes" . | nindent 8 }}
{{- end -}}

{{- define "rlhf.mounts" -}}
- {name: runs, mountPath: /runs}
- {name: data, mountPath: /data, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end -}}

{{- define "rlhf.volumes" -}}
- name: runs
  emptyDir: {}
- name: data
  persistentVolumeClaim: {claimName: {{ include "rlhf.claim" (list . "data") }}, readOnly: true}
- name: tmp
  emptyDir: {}
{{- end -}}
