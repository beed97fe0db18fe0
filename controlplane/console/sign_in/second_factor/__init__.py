"""Second factor of operators: codes of an authenticator app (TOTP) and backup codes. Needs the extra `second-factor`.

An app of Django that is installed if LEASEHOLD_SECOND_FACTOR is set. Nothing else imports it."""
