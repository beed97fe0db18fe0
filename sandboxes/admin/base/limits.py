"""Labels of the limits of resources on forms."""

LIMIT_LABELS = {
    "max_memory_mib": "Maximum memory by request (MiB)",
    "max_millicpus": "Maximum CPU by request (millicores)",
    "max_disk_mib": "Maximum disk by request (MiB)",
    "max_gpus": "Maximum GPUs by request",
    "allowed_images": "Images by request",
    "allowed_sizes": "Sizes by request",
    "allowed_gpu_types": "GPU types by request",
}
