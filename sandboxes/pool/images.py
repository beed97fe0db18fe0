"""Images of templates: the vendor's image behind the name that a pool or a sandbox has."""

from sandboxes.models import ImageTemplate, Sandbox
from sandboxes.providers.base import TEMPLATE_TAG_PREFIX


def find_image_id(sandbox: Sandbox) -> str:
    """Return the identity of the image that a sandbox names, if a template of its host has that name; otherwise empty."""
    if not sandbox.image.startswith(TEMPLATE_TAG_PREFIX):
        return ""
    found = ImageTemplate.objects.filter(host=sandbox.host_id, image=sandbox.image).values_list("image_id", flat=True)
    return found.first() or ""
