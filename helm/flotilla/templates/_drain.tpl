{{/* Which of `cells` and `front-ends` run in a group, as a JSON list. */}}
{{- define "flotilla.runs" -}}
{{- ternary .runs (list "cells" "front-ends") (hasKey . "runs") | toJson -}}
{{- end }}

{{/*
Seconds that a pod has to end. Takes `root`, `group` (its values) and `isHead`. The longest of what goes on in it: answers of cells,
which may have ranks and drafters anywhere, and streams through a proxy, which the head has and every pod of a group that runs
something. 30 s more are for cells and front ends to be made elsewhere, to say that they leave, and for Ray's processes to end.
*/}}
{{- define "flotilla.gracePeriod" -}}
{{- $scaling := default (dict) .root.Values.config.scaling -}}
{{- $longest := dig "cells" "drain_timeout_s" 10 $scaling | float64 -}}
{{- if or .isHead (include "flotilla.runs" .group | fromJsonArray) -}}
{{- $longest = maxf $longest (dig "front_ends" "drain_timeout_s" 300 $scaling) -}}
{{- end -}}
{{- default (ceil $longest | int | add 30) .group.terminationGracePeriodSeconds | int -}}
{{- end }}

{{/*
Seconds for which Ray, told to end, drains its node: Serve makes replicas elsewhere, and those here go on until then at most. Its own
30 s know nothing of how long pods have. What is left of the pod's time is for Ray's processes to end.
*/}}
{{- define "flotilla.drainTimeout" -}}
{{- max 0 (sub (include "flotilla.gracePeriod" . | int) 5) -}}
{{- end }}
