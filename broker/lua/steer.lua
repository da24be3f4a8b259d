-- steer.lua: a command of an operator, or of the adaptive lag: done or refused, and an event either way.
-- KEYS  1 prefix; touches policy, evaluator, events, counters
-- ARGV  1 command: lag | pause | resume | drain | checkpoint | evaluate  2 value (lag)  3 who and why, for the log
--       4 value expected now, or '' (lag)
-- returns {"done", now ms, version, sentence} | {"refused", now ms, version, reason, sentence}
local command, value, why = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local function answer(reason, sentence)
  event(reason and 'steer-refused' or 'steer', command .. ': ' .. sentence .. ' (' .. why .. ')')
  count(reason and 'steering_refused' or 'steering_done')
  if reason then return {'refused', int(now), policy.version, reason, sentence} end
  return {'done', int(now), policy.version, sentence}
end
if policy.status == 'finished' or policy.status == 'stopped' then
  return answer('ended', 'the run is ' .. policy.status)
end
if command == 'lag' then
  if value < n('publish_interval') - 1 then
    return answer('interval', 'weights are published every ' .. policy.publish_interval ..
      ' versions: below a bound of ' .. (n('publish_interval') - 1) .. ' no group could be trained')
  end
  if ARGV[4] ~= '' and ARGV[4] ~= policy.max_lag then
    return answer('changed', 'max_lag is ' .. policy.max_lag .. ' by now, not ' .. ARGV[4])
  end
  local before = policy.max_lag
  if tonumber(before) == value then return answer(nil, 'max_lag is ' .. before .. ' already') end
  set({max_lag = int(value), lag_changed_step = policy.step})
  return answer(nil, 'max_lag ' .. before .. ' -> ' .. int(value))
elseif command == 'pause' then
  set({paused = '1'})
  return answer(nil, 'admission is paused')
elseif command == 'resume' then
  set({paused = '0'})
  if policy.status == 'draining' then set({status = 'running'}) end
  return answer(nil, 'admission goes on')
elseif command == 'drain' then
  if policy.status ~= 'running' and policy.status ~= 'draining' then
    return answer('not-running', 'the run is ' .. policy.status)
  end
  set({status = 'draining'})
  return answer(nil, 'no group is started; ' .. in_flight() .. ' in flight are finished and trained')
elseif command == 'checkpoint' then
  if now > n('trainer_deadline') then
    return answer('no-trainer', 'no trainer has renewed its lease')
  end
  if n('step') <= n('durable_step') then
    return answer('nothing-new', 'step ' .. policy.step .. ' is in a durable checkpoint already')
  end
  set({checkpoint_asked = policy.step})
  return answer(nil, 'the trainer saves step ' .. policy.step .. ' or the next one')
elseif command == 'evaluate' then
  if now > (tonumber(redis.call('HGET', k('evaluator'), 'deadline')) or 0) then
    return answer('no-evaluator', 'no evaluator lives: set evaluation.tasks, or start `lagrange evaluator`')
  end
  redis.call('HSET', k('evaluator'), 'asked', policy.step)
  return answer(nil, 'the evaluator takes the newest published version next')
end
return answer('unsupported', 'there is no command ' .. command)
