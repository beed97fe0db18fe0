"""Limits of the resources that a request may state, as columns that several tables share."""

import re

from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import Value

MIN_MEMORY_MIB, MIN_MILLICPUS, MIN_DISK_MIB = 16, 50, 1
GPU_TYPE_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,31}"
SIZE_NAME_PATTERN = r"[-A-Za-z0-9_]{1,32}"


def validate_images(value: object) -> None:
    """Raise ValidationError unless the value is a list of names of images."""
    if not isinstance(value, list) or not all(isinstance(name, str) and 0 < len(name) <= 255 for name in value):
        raise ValidationError("Must be a list of names of images, each of 1 to 255 characters.")


def validate_sizes(value: object) -> None:
    """Raise ValidationError unless the value is a list of names of instance types."""
    _validate_names(value, SIZE_NAME_PATTERN, "instance types, such as standard-1")


def validate_gpu_types(value: object) -> None:
    """Raise ValidationError unless the value is a list of GPU types in capitals."""
    _validate_names(value, GPU_TYPE_PATTERN, "GPU types in capitals, such as H100")
    if isinstance(value, list) and any(name != name.upper() for name in value):
        raise ValidationError("Must be a list of GPU types in capitals, such as H100.")


def _validate_names(value: object, pattern: str, described: str) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) and re.fullmatch(pattern, name) for name in value):
        raise ValidationError(f"Must be a list of {described}.")


class ResourceLimits(models.Model):
    """Maximum resources, images, sizes and GPU types that a lease may request. Empty values set no limit."""

    max_memory_mib = models.PositiveIntegerField(
        null=True, blank=True, validators=[MinValueValidator(MIN_MEMORY_MIB)],
        help_text="Maximum memory that a lease may request, MiB. Empty: limited by the pool alone.",
    )  # fmt: skip
    max_millicpus = models.PositiveIntegerField(
        null=True, blank=True, validators=[MinValueValidator(MIN_MILLICPUS)],
        help_text="Maximum CPU that a lease may request, millicores. Empty: limited by the pool alone.",
    )  # fmt: skip
    max_disk_mib = models.PositiveIntegerField(
        null=True, blank=True, help_text="Maximum disk that a lease may request, MiB. Empty: limited by the pool alone."
    )
    max_gpus = models.PositiveSmallIntegerField(
        null=True, blank=True, help_text="Maximum number of GPUs that a lease may request. Empty: limited by the pool alone."
    )
    allowed_images = models.JSONField(
        default=list, db_default=Value([], models.JSONField()), blank=True, validators=[validate_images],
        help_text="Images that a lease may request. Empty: every image that the pool allows.",
    )  # fmt: skip
    allowed_sizes = models.JSONField(
        default=list, db_default=Value([], models.JSONField()), blank=True, validators=[validate_sizes],
        help_text="Names of the instance types that a lease may request, which then may state no other memory or CPU. Empty: "
        "every size within the limits.",
    )  # fmt: skip
    allowed_gpu_types = models.JSONField(
        default=list, db_default=Value([], models.JSONField()), blank=True, validators=[validate_gpu_types],
        help_text="GPU types that a lease may request, in capitals. Empty: every type of the provider.",
    )  # fmt: skip

    class Meta:
        abstract = True
