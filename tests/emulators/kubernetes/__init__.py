"""Emulator of the Kubernetes API. Pods are containers on the real Docker Engine.

`api` is the API server: storage, validation, admission, authorization and watches. `node` is the kubelet of one node:
containers, volumes, exec, logs and the network of the Pods. The emulator serves unmodified kubectl and the
official Python client."""
