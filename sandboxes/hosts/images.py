"""Images of pools that an engine does not have, as its worker last asked. Health, metrics and the host's page read the row."""

import structlog

from sandboxes import providers
from sandboxes.models import Host, Pool
from sandboxes.providers.base import Provider
from sandboxes.providers.errors import ProviderError

log = structlog.get_logger(__name__)


def record_missing_images(provider: Provider, host: Host) -> dict[str, str]:
    """Ask the engine of a host for the images of the provider's pools, and store those that it does not have.

    Return them by the pool's name. Without an answer the stored ones stay. Pools that are drained start nothing."""
    names = [provider.name, ""] if provider.name == providers.get_default_provider_name() else [provider.name]
    pools = Pool.objects.filter(provider__in=names, draining=False).order_by("name").values_list("name", "image")
    images = {name: image or providers.get_default_image(provider.name) for name, image in pools}
    try:
        absent = provider.find_missing_images(set(images.values()))
    except ProviderError as error:
        log.warning("images not checked", host=host.name, provider=provider.name, error=str(error))
        return host.missing_images or {}
    missing = {name: image for name, image in images.items() if image in absent}
    if missing != host.missing_images:
        Host.objects.filter(pk=host.pk).update(missing_images=missing)
    for name in sorted(missing.keys() - (host.missing_images or {}).keys()):
        log.error("image of a pool is missing", pool=name, image=missing[name], host=host.name)
    return missing
