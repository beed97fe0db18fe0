"""Kubelet of the emulator: Pods as containers of a Docker Engine."""
