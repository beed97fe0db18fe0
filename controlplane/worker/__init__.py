"""App before django_q in INSTALLED_APPS, whose `qcluster` replaces that of django-q2."""
