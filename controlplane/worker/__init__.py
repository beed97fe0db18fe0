"""Django app of the queue worker. Precedes django_q in INSTALLED_APPS, so that its `qcluster` overrides django-q2's."""
