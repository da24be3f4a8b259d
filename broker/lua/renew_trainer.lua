-- renew_trainer.lua: the trainer is alive.
-- KEYS  1 prefix; touches policy
-- ARGV  1 epoch
-- returns {"renewed"} | {"fenced", holder}
set({trainer_deadline = int(now + n('trainer_lease_ms'))})
return {'renewed'}
