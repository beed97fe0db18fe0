// Starts the repository server of AT Protocol, configured by variables PDS_..., on 127.0.0.1. It listens on all addresses by itself.
import net from 'node:net'
import { PDS, envToCfg, envToSecrets, readEnv } from '@atproto/pds'

const { listen } = net.Server.prototype
net.Server.prototype.listen = function (port, ...rest) {
  return listen.call(this, port, '127.0.0.1', ...rest)
}
const env = readEnv()
const pds = await PDS.create(envToCfg(env), envToSecrets(env))
await pds.start()
console.log('ready')
