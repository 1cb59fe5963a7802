--[[
  Replaces an identity's overrides, with their expiry, in one step: a block must not lapse while it is written again.
  Version  1

  KEYS   the identity's overrides
  ARGV   now, when the last of them ends in ms, then field and value of each; none: there are none any more
]]
redis.call("DEL", KEYS[1])
if ARGV[3] then
  redis.call("HSET", KEYS[1], unpack(ARGV, 3))
  redis.call("PEXPIRE", KEYS[1], digits(math.max(1, tonumber(ARGV[2]) - now)))
end
return 1
