"""Indexes of the calls of a lease that are not metered, and of the open calls of a server process."""

from django.db import migrations, models
from django.db.models import Q

from sandboxes.db.concurrent_indexes import AddIndexConcurrently


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("sandboxes", "0081_carry_model_rates")]

    operations = [
        AddIndexConcurrently(
            model_name="llmcall",
            index=models.Index(fields=["holder"], condition=Q(counted=False), name="llmcall_holder_uncounted"),
        ),
        AddIndexConcurrently(
            model_name="llmcall",
            index=models.Index(fields=["server"], condition=Q(ended_at__isnull=True), name="llmcall_server_open"),
        ),
    ]
