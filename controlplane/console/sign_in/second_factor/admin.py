"""No admin pages of the devices: they would show secrets. `manage.py second_factor` lists and removes devices."""

from django.contrib import admin
from django_otp.plugins.otp_static.models import StaticDevice
from django_otp.plugins.otp_totp.models import TOTPDevice

for model in (StaticDevice, TOTPDevice):
    admin.site.unregister(model)
